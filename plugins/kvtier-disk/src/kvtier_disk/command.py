"""``kvtier disk``: look at a disk tier's root, or make its index anew from the extents.

Decides what is shown; what is done is done by ``extents``. Works on roots with ``layout = "extents"``, and
changes nothing anywhere else.
"""

import argparse
import sys
from pathlib import Path

from kvtier_core import ConfigError, TierOpenError
from kvtier_core.tier import format_size
from kvtier_disk.extents.index import Index
from kvtier_disk.extents.place import RootRefusedError, refuse_foreign
from kvtier_disk.extents.root import Root
from kvtier_disk.folder import Folder

help = "look at a disk tier's root, or make its index anew"  # noqa: A001 - the commands' interface

_MAX_OPEN = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action", choices=["status", "rebuild"], help="show what the root holds, or make its index anew"
    )
    parser.add_argument("root", type=Path, help="the tier's root directory")
    parser.add_argument(
        "--allow-writable-by-others",
        action="store_true",
        help="also where another user or a group owns the root or may write to it",
    )


def run(args: argparse.Namespace) -> int:
    """Do it; 0. Raises ``ConfigError`` where no root is, ``TierOpenError`` when the root or its index can't be used."""
    folder = Folder(args.root.expanduser().absolute(), shared=args.allow_writable_by_others)
    root = Root(folder, capacity=None, max_open=_MAX_OPEN, warn=_tell)
    try:
        refuse_foreign(folder, root.home)
        if not folder.is_there():
            raise ConfigError(f"there is no directory {args.root}: name the tier's root")
        if args.action == "rebuild":
            if not root.is_one():
                raise ConfigError(
                    f"{args.root} holds neither an index nor an extent of a disk tier: name its root"
                )
            with root.exclusively():
                root.refuse_earlier()
                root.rebuild("that was asked for").database.close()
        _show(root)
    except RootRefusedError as error:
        raise TierOpenError(str(error)) from error
    except OSError as error:
        if isinstance(error, TierOpenError):
            raise
        raise TierOpenError(f"{args.root}: {error.strerror or error}") from error
    return 0


def _show(root: Root) -> None:
    index = root.indexes.snapshot()
    if index is None:
        raise ConfigError(
            f"{root.path} holds no index of a disk tier: name its root, or make its index by `rebuild`"
        )
    try:
        _show_index(root, index)
    finally:
        index.database.close()


def _show_index(root: Root, index: Index) -> None:
    census = index.census(journal_bytes=0)
    held = census.bytes_by_namespace()
    total = held.total() + root.indexes.total_bytes()
    _say(f"{root.path}: {format_size(total)} in {len(census.extents)} extents and the index")
    for id_, namespace in sorted(index.namespaces().items(), key=lambda item: -census.used[item[0]]):
        blocks = sum(1 for _ in index.pairs_of(id_))
        size, used = format_size(namespace.row_bytes), format_size(blocks * namespace.row_bytes)
        _say(
            f"  {namespace.name}: {blocks} blocks of {size}, {used} used of {format_size(held[id_])} reserved"
        )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
