"""Counts what a root takes at most: its extents, their slots in the index, and all else that the index needs.

Pure: what there is comes from the tables. Which of it goes is up to ``room``.
"""

from collections.abc import Collection, Mapping, Sequence

from kvtier_disk.extents.database import PAGE_BYTES
from kvtier_disk.extents.room import Census, ExtentInfo
from kvtier_disk.extents.tables import ExtentRow

SLOT_BYTES = 160
"""What a slot takes in the index, changes included, at most."""
BASE_BYTES = 256 << 10
"""What the index takes without any slot, with everything that is neither extent, slot nor journal."""
_BESIDE_BYTES = 64 << 10
"""What of that is not in the index's own file: the first namespaces."""
_FIRST_NAMESPACES = 4
_NAMESPACE_BYTES = 16 << 10
"""What each one after the first takes: its directory, and its description."""


def count(
    rows: Sequence[ExtentRow],
    busy: Collection[int],
    used: Mapping[int, float],
    pages: int,
    journal_bytes: int,
) -> Census:
    """The census of a root with these extents, the *busy* ones among them, and an index of so many *pages*.

    *used* tells of each namespace when it was used last.
    """
    extents = [
        ExtentInfo(
            id=row.id,
            namespace=row.namespace,
            bytes=row.bytes,
            is_busy=not row.is_ready or row.id in busy,
            index_bytes=row.slots * SLOT_BYTES,
        )
        for row in rows
    ]
    promised = BASE_BYTES + sum(extent.index_bytes for extent in extents)
    more_namespaces = max(0, len(used) - _FIRST_NAMESPACES)
    return Census(
        extents=extents,
        used=used,
        other_bytes=BASE_BYTES + more_namespaces * _NAMESPACE_BYTES + journal_bytes,
        slack_bytes=max(0, _BESIDE_BYTES + pages * PAGE_BYTES - promised),
    )
