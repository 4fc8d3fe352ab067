"""Blocks in fewer bytes. Decides how a block is written so, and takes nothing for one that it can't have written.

KV is numbers of 16 bits: their high bytes, sign and exponent, are much alike, their low bytes hardly. So the two are
parted into planes, and each plane is a zstd frame where that is smaller::

    <version, 1 byte><bytes of the first plane, 4><first plane><second plane>

A plane of half a row's bytes is no frame. Numbers of other sizes are parted in the same way, which does them no harm.
"""

import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

Unpack = Callable[[bytearray, memoryview], bool]

_VERSION = b"\1"
_LENGTH_BYTES = 4
_HEAD_BYTES = len(_VERSION) + _LENGTH_BYTES
_LEVEL = 1
"""Of zstd: higher ones take longer and make KV no smaller (1.42 times at 1, 1.38 at 3, 1.41 at 6)."""


def can_unpack() -> bool:
    """Whether the library is installed."""
    return find_spec("zstandard") is not None


class Zstd:
    """Packs and unpacks blocks. Safe from any thread."""

    def __init__(self) -> None:
        self._mine = threading.local()  # the library's objects are for one thread at a time

    def pack(self, block: memoryview) -> memoryview | bytes:
        """*block* in fewer bytes; itself where that takes no fewer."""
        planes = np.frombuffer(block, np.uint8).reshape(-1, 2).T
        parts = [self._smaller(plane.tobytes()) for plane in planes]
        packed = b"".join([_VERSION, len(parts[0]).to_bytes(_LENGTH_BYTES, "little"), *parts])
        return packed if len(packed) < len(block) else block

    def unpack(self, packed: bytearray, into: memoryview) -> bool:
        """Fill *into* with the block; false where *packed* is none of its size. Takes memory for one plane at most."""
        whole = memoryview(packed)
        end = _HEAD_BYTES + int.from_bytes(whole[len(_VERSION) : _HEAD_BYTES], "little")
        if whole[: len(_VERSION)] != _VERSION or end > len(whole):
            return False
        row = np.frombuffer(into, np.uint8).reshape(-1, 2)
        for number, part in enumerate((whole[_HEAD_BYTES:end], whole[end:])):
            plane = self._plane(part, len(row))
            if plane is None:
                return False
            row[:, number] = np.frombuffer(plane, np.uint8)
        return True

    def _smaller(self, plane: bytes) -> bytes:
        frame: bytes = self._codec().compressor.compress(plane)
        return frame if len(frame) < len(plane) else plane

    def _plane(self, part: memoryview, size: int) -> memoryview | bytes | None:
        if len(part) == size:
            return part
        codec = self._codec()
        try:
            claimed = codec.library.get_frame_parameters(part)
            if claimed.content_size != size or claimed.window_size > size:
                return None
            plane: bytes = codec.decompressor.decompress(part, max_output_size=size, allow_extra_data=False)
        except codec.library.ZstdError:
            return None
        return plane if len(plane) == size else None

    def _codec(self) -> "_Codec":
        if not hasattr(self._mine, "codec"):
            self._mine.codec = _Codec()
        codec: _Codec = self._mine.codec
        return codec


class _Codec:
    """What one thread packs and unpacks with."""

    def __init__(self) -> None:
        import zstandard  # noqa: PLC0415 - an extra

        self.library: Any = zstandard
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()
