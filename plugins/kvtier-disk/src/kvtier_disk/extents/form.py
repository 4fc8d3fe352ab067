r"""The form of an extent file: a header, a table of keys, then slots of one size.

::

    header   4096 bytes: what the file is, with a checksum
    table    64 bytes a slot: the key last written there and when, with a checksum; filled up to 4096 bytes
    slots    one row each, a multiple of 4096 bytes apart

The index says which slots hold blocks; the table only tells, once the index is lost, which key a row's proof has to
name. So an entry need not be written in step with its row: one that does not fit its row is no block.

Pure: no I/O. A *place* is one slot of one extent as one number, so that neighbouring slots have neighbouring places.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_core.tier import OffloadKey

ALIGNMENT = 4096
HEADER_BYTES = 4096
ENTRY_BYTES = 64
MAX_KEY_BYTES = 48
SLOT_BITS = 24
MAX_SLOTS = 1 << SLOT_BITS
MAX_EXTENT = (1 << 63 - SLOT_BITS) - 1
"""So that every place is a number that SQLite has room for."""

MAGIC = b"kvtier extent 1\n"
"""What an extent begins with, and nothing else does."""
_HEADER = struct.Struct("<QQQH")  # extent, row bytes, slots, length of the namespace's name
_CHECKSUM = struct.Struct("<I")
_ENTRY = struct.Struct(f"<dB{MAX_KEY_BYTES}s3x")  # time, length of the key, key


def place_of(extent: int, slot: int) -> int:
    """The place of one slot."""
    return extent << SLOT_BITS | slot


def extent_of(place: int) -> int:
    """The extent a place is in."""
    return place >> SLOT_BITS


def slot_of(place: int) -> int:
    """The slot of its extent that a place is."""
    return place & (MAX_SLOTS - 1)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many slots an extent has and of which size."""

    row_bytes: int
    slots: int

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.row_offset(self.slots)

    def row_offset(self, slot: int) -> int:
        """Where the row of *slot* begins."""
        return HEADER_BYTES + _aligned(self.slots * ENTRY_BYTES) + slot * _aligned(self.row_bytes)

    @staticmethod
    def entry_offset(slot: int) -> int:
        """Where the table's entry of *slot* begins."""
        return HEADER_BYTES + slot * ENTRY_BYTES

    @staticmethod
    def fitting(row_bytes: int, file_bytes: int) -> "Shape":
        """The shape with as many slots as fit into *file_bytes*, one at least."""
        slots = max(1, (file_bytes - HEADER_BYTES - ALIGNMENT) // (_aligned(row_bytes) + ENTRY_BYTES))
        return Shape(row_bytes=row_bytes, slots=min(slots, MAX_SLOTS))


def make_header(extent: int, shape: Shape, namespace: str) -> bytes:
    """The first ``HEADER_BYTES`` of an extent."""
    name = namespace.encode()
    content = MAGIC + _HEADER.pack(extent, shape.row_bytes, shape.slots, len(name)) + name
    return (content + _CHECKSUM.pack(zlib.crc32(content))).ljust(HEADER_BYTES, b"\0")


def read_header(header: bytes) -> tuple[int, Shape, str] | None:
    """Extent, shape and namespace from a header; ``None`` when it is none, or damaged."""
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        return None
    extent, row_bytes, slots, length = _HEADER.unpack_from(header, len(MAGIC))
    end = len(MAGIC) + _HEADER.size + length
    if end + _CHECKSUM.size > HEADER_BYTES or not 0 < slots <= MAX_SLOTS or row_bytes == 0:
        return None
    if not 0 < extent <= MAX_EXTENT:
        return None
    if _CHECKSUM.unpack_from(header, end)[0] != zlib.crc32(header[:end]):
        return None
    name = header[end - length : end].decode(errors="replace")
    return extent, Shape(row_bytes=row_bytes, slots=slots), name


def make_entries(keys: Sequence[OffloadKey], time: float) -> bytes:
    """The table's entries for neighbouring rows stored under *keys*. Raises ``ValueError`` for one too long."""
    parts: list[bytes] = []
    for key in keys:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key must have 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
        content = _ENTRY.pack(time, len(key), key)
        parts += (content, _CHECKSUM.pack(zlib.crc32(content)))
    return b"".join(parts)


def read_entry(entry: bytes) -> tuple[OffloadKey, float] | None:
    """Key and time from a table's entry; ``None`` when it is none, or damaged."""
    if len(entry) != ENTRY_BYTES:
        return None
    time, length, key = _ENTRY.unpack_from(entry)
    if not 0 < length <= MAX_KEY_BYTES or entry[_ENTRY.size :] != _CHECKSUM.pack(
        zlib.crc32(entry[: _ENTRY.size])
    ):
        return None
    return OffloadKey(key[:length]), time
