"""Enters extents into an index that does not know them, with the blocks that are in them.

Decides what becomes of files that have an extent's name: those that are whole are entered, those that carry an extent's
header and can't be entered are removed, and those that carry none, or can't be read, are somebody's and stay.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

from kvtier_core.tier import OffloadKey, Sealer
from kvtier_disk.extents.extent_files import ExtentFiles, ExtentLostError
from kvtier_disk.extents.form import Shape, extent_of, place_of, read_entry
from kvtier_disk.extents.found import OUT_OF_DESCRIPTORS, FoundExtent, identify
from kvtier_disk.extents.index import NOBODY, Index
from kvtier_disk.extents.tables import Namespace


def adopt(
    index: Index,
    extents: Sequence[FoundExtent],
    taken: Collection[int],
    files_of: Callable[[Namespace], ExtentFiles],
    warn: Callable[[str], None],
) -> tuple[int, int]:
    """Enter *extents* with the blocks whose proofs name what the table says; returns how many of both.

    An extent whose number is *taken*, or that an earlier one of *extents* has, can't be entered: a number stands for
    one extent of the whole root. Raises ``OSError`` for the index, and where no file can be opened now. Cost: one
    small read for every slot ever used.
    """
    entered: dict[int, tuple[FoundExtent, Shape]] = {}
    for found in extents:
        shape, is_ours = identify(found)
        if shape is not None and found.number not in taken and found.number not in entered:
            entered[found.number] = (found, shape)
        elif is_ours:
            problem = (
                "is no extent of its namespace, or damaged"
                if shape is None
                else "has another extent's number"
            )
            warn(f"{found.path} {problem}: removed")
            with suppress(OSError), found.folder.opened() as handle:
                handle.unlink(found.name)
        else:
            warn(f"{found.path} is no extent by its header, or can't be read: left alone")
    newest: dict[tuple[str, int, OffloadKey], tuple[float, int]] = {}
    for found, shape in entered.values():
        namespace = Namespace(id=NOBODY, name=found.namespace, row_bytes=shape.row_bytes)
        for key, place, at in _survey(files_of(namespace), found):
            slot = (found.namespace, shape.row_bytes, key)
            newest[slot] = max(newest.get(slot, (at, place)), (at, place))
    by_extent: dict[int, list[tuple[OffloadKey, int, float]]] = {}
    for (_, _, key), (at, place) in newest.items():
        by_extent.setdefault(extent_of(place), []).append((key, place, at))
    for number, (found, shape) in entered.items():
        namespace = index.add_namespace(found.namespace, shape.row_bytes, 0.0)
        index.adopt_extent(number, namespace.id, shape.slots, shape.file_bytes, by_extent.get(number, []))
    return len(entered), len(newest)


def _survey(files: ExtentFiles, extent: FoundExtent) -> Iterator[tuple[OffloadKey, int, float]]:
    sealer = Sealer(extent.namespace)
    try:
        _, rows = files.survey(extent.number)
    except ExtentLostError:
        return
    except OSError as error:
        if error.errno in OUT_OF_DESCRIPTORS:
            raise
        return
    finally:
        files.close()
    for slot, (entry, tail) in enumerate(rows):
        known = read_entry(entry)
        if known is not None and sealer.names(known[0], tail):
            yield known[0], place_of(extent.number, slot), known[1]
