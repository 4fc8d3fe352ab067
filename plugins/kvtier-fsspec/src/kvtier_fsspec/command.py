"""``kvtier object``: show what a bucket holds, or remove from it what no engine will use.

Decides what is shown and what nobody needs. Works below the URLs of object stores alone. It writes no object; ``gc``
removes some.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import ValidationError

from kvtier_core import ConfigError
from kvtier_core.tier import format_size
from kvtier_fsspec import description
from kvtier_fsspec.bucket import Bucket
from kvtier_fsspec.faults import StorageError, open_error
from kvtier_fsspec.layout import BLOCK_NAME
from kvtier_fsspec.packs import PackName
from kvtier_fsspec.settings import OBJECT_STORES, FsspecSettings

help = "show what a bucket holds, or remove from it what no engine will use"  # noqa: A001 - the commands' interface

_AT_ONCE = 1000
_DAY_S = 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "action",
        choices=["status", "gc"],
        help="show what is there, or remove namespaces that no engine uses and what earlier versions left",
    )
    parser.add_argument("url", help="the tier's url, such as s3://bucket/prefix")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one of the tier's storage_options, such as endpoint_url=http://storage.example:9000; repeat it for more. "
        "Give credentials by the environment: other users can read a command line",
    )


def run(args: argparse.Namespace) -> int:
    """Do it; 0. Raises ``ConfigError`` for a URL or an option that can't be meant, ``TierOpenError`` for a fault."""
    settings = _settings(args.url, args.option)
    bucket = Bucket(settings)
    try:
        names = sorted(bucket.namespaces())
        told = bucket.heads([_description_of(name) for name in names], description.LONGEST)
        namespaces = [_look(bucket, name, content) for name, content in zip(names, told, strict=True)]
        if args.action == "status":
            _show(bucket, namespaces)
        else:
            _collect(bucket, namespaces)
    except StorageError as error:
        raise open_error("kvtier object", bucket.shown_url, error, settings.protocol) from None
    finally:
        bucket.close()
    return 0


@dataclass
class _Namespace:
    """What lies below one folder. ``kept_for`` says why all of it stays, where it does."""

    name: str
    kept_for: str
    packs: int = 0
    blocks: int = 0
    bytes: int = 0
    newest: float = 0.0
    """When the last pack was stored, in seconds since the epoch."""
    left: list[str] = field(default_factory=list)
    """Objects that no engine uses."""
    left_bytes: int = 0
    strange: int = 0
    """Objects that are not kvtier's. They stay."""


def _settings(url: str, options: list[str]) -> FsspecSettings:
    told: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError("--option takes NAME=VALUE, such as endpoint_url=http://storage.example:9000")
        told[name] = value
    try:
        settings = FsspecSettings.model_validate({"type": "fsspec", "url": url, "storage_options": told})
    except ValidationError as error:
        raise ConfigError(
            "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in error.errors())
        ) from None
    if settings.protocol not in OBJECT_STORES:
        raise ConfigError(
            f"kvtier object works on buckets ({', '.join(sorted(OBJECT_STORES))}), not on {settings.protocol}://"
        )
    return settings


def _description_of(name: str) -> str:
    return f"{name}/{description.NAME}"


def _look(bucket: Bucket, name: str, told: object) -> _Namespace:
    is_ours = isinstance(told, bytes) and description.is_one(told)
    is_unused = is_ours and description.is_out_of_use(told)
    if isinstance(told, Exception):
        kept_for = f"left alone, its {description.NAME} can't be read ({told})"
    else:
        kept_for = "" if is_unused else "in use" if is_ours else "not kvtier's: it is left alone"
    found = _Namespace(name, kept_for)
    for one in bucket.objects(name) if is_ours else ():
        pack = PackName.at(one.path)
        if pack is not None:
            found.packs += 1
            found.blocks += pack.blocks
            found.bytes += one.size
            found.newest = max(found.newest, pack.stamp / 1000)
        is_old = one.is_leftover or BLOCK_NAME.fullmatch(one.path) is not None
        if is_old or (is_unused and (pack or one.is_temporary)):
            found.left.append(one.path)
            found.left_bytes += one.size
        elif pack is None and not one.is_temporary:
            found.strange += 1
    if is_unused:  # last, so that a gc that was interrupted finds the rest again
        found.left.append(_description_of(name))
    return found


def _show(bucket: Bucket, namespaces: list[_Namespace]) -> None:
    total = sum(one.bytes for one in namespaces)
    left = sum(one.left_bytes for one in namespaces)
    _say(f"{bucket.shown_url}: {format_size(total)} in {sum(one.packs for one in namespaces)} packs")
    for one in namespaces:
        _say(f"  {one.name}: {', '.join(_facts(one))}")
    _say(
        f"`kvtier object gc` would remove {sum(len(one.left) for one in namespaces)} objects ({format_size(left)})"
    )


def _facts(one: _Namespace) -> Iterator[str]:
    yield one.kept_for or "no engine uses it"
    if one.strange:
        yield f"{one.strange} objects that are not kvtier's and stay"
    if one.packs:
        yield f"{one.blocks} blocks in {one.packs} packs, {format_size(one.bytes)}"
        yield f"the last one stored {max(0.0, time.time() - one.newest) / _DAY_S:.1f} days ago"


def _collect(bucket: Bucket, namespaces: list[_Namespace]) -> None:
    for one in namespaces:
        for begin in range(0, len(one.left), _AT_ONCE):
            if not one.kept_for and _is_used_again(bucket, one.name):
                _say(f"{one.name}: an engine uses it now, {len(one.left) - begin} objects stay")
                break
            bucket.remove(one.left[begin : begin + _AT_ONCE])
        else:
            if one.left:
                _say(f"{one.name}: removed {len(one.left)} objects ({format_size(one.left_bytes)})")
    if not any(one.left for one in namespaces):
        _say(f"{bucket.shown_url}: nothing to remove")


def _is_used_again(bucket: Bucket, name: str) -> bool:
    (told,) = bucket.heads([_description_of(name)], description.LONGEST)
    return not description.is_out_of_use(told)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
