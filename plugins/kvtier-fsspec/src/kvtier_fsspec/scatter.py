"""Puts the bytes of a read into the blocks that want them, as they come. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvtier_fsspec.compression import Unpack
from kvtier_fsspec.packs import Read


@dataclass(slots=True)
class _Block:
    """One block of a read: where its bytes go."""

    bytes: int
    """That it takes in the pack."""
    intos: list[memoryview] = field(default_factory=list)


class Scatter:
    """Of one read. ``take`` its bytes from first to last."""

    def __init__(self, read: Read, block_bytes: int, intos: Sequence[memoryview], unpack: Unpack) -> None:
        ends = [read.pack.end_of(number, block_bytes) for number in range(read.first - 1, read.end)]
        self._blocks = [_Block(end - begin) for begin, end in pairwise(ends)]
        for number, position in read.wanted:
            self._blocks[number - read.first].intos.append(intos[position])
        self._block_bytes = block_bytes
        self._unpack = unpack
        self._number = 0
        """Of the block whose bytes come next."""
        self._packed = bytearray()
        """What has come of a block that is packed."""
        self._came = 0
        """Bytes of that block that have come."""

    def take(self, part: memoryview) -> None:
        """The next bytes; those behind the end of the read are passed over."""
        while part and self._number < len(self._blocks):
            block = self._blocks[self._number]
            some = part[: block.bytes - self._came]
            self._put(block, some)
            self._came += len(some)
            part = part[len(some) :]
            if self._came == block.bytes:
                self._end(block)
                self._number += 1
                self._came = 0

    def _put(self, block: _Block, some: memoryview) -> None:
        if block.bytes == self._block_bytes:
            for into in block.intos:
                into[self._came : self._came + len(some)] = some
        elif block.intos:
            self._packed += some

    def _end(self, block: _Block) -> None:
        """All of it has come. One that is damaged gives zeros, which prove nothing: the core counts it so."""
        if not self._packed:
            return
        for into in block.intos:
            if not self._unpack(self._packed, into):
                into[:] = bytes(len(into))
        self._packed = bytearray()
