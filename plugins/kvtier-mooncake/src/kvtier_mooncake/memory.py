"""Where the blocks of a job lie in registered memory: in the pool's rows, or in a buffer that they are copied through.

The buffer is for tools and tests, which open a tier without a pool.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Protocol

from kvtier_core.tier import PoolView, TierJob
from kvtier_mooncake.client import Region


class Memory(Protocol):
    """Registered memory."""

    region: Region

    def addresses(self, thread: int, job: TierJob, part: range) -> Sequence[int]:
        """Where these blocks of *job* lie while *thread* moves them."""
        ...

    def fill(self, thread: int, job: TierJob, part: range) -> None:
        """Before a store: their bytes are to be there."""
        ...

    def empty(self, thread: int, job: TierJob, position: int, at: int) -> None:
        """After a load: the block at *position* has come to the *at*-th address."""
        ...


class PoolMemory:
    """The pool itself: nothing is copied."""

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool
        self.region = Region(pool.address, pool.num_rows * pool.row_stride)

    def addresses(self, thread: int, job: TierJob, part: range) -> Sequence[int]:  # noqa: ARG002 - rows belong to a job
        """Those of the rows."""
        return [self._pool.address + job.rows[position] * self._pool.row_stride for position in part]

    def fill(self, thread: int, job: TierJob, part: range) -> None:
        """They are."""

    def empty(self, thread: int, job: TierJob, position: int, at: int) -> None:
        """It is where it belongs."""


class StagingMemory:
    """A buffer of its own, *most* blocks a thread."""

    def __init__(self, row_bytes: int, most: int, threads: int) -> None:
        self._row_bytes = row_bytes
        self._most = most
        self._buffer = mmap.mmap(-1, threads * most * row_bytes)
        self.region = Region(ctypes.addressof(ctypes.c_char.from_buffer(self._buffer)), len(self._buffer))

    def addresses(self, thread: int, job: TierJob, part: range) -> Sequence[int]:  # noqa: ARG002 - blocks are copied
        """The first ones of the thread's part of the buffer."""
        first = self.region.address + thread * self._most * self._row_bytes
        return [first + at * self._row_bytes for at in range(len(part))]

    def fill(self, thread: int, job: TierJob, part: range) -> None:
        """Copy them there."""
        for at, position in enumerate(part):
            begin = (thread * self._most + at) * self._row_bytes
            self._buffer[begin : begin + self._row_bytes] = job.buffers[position]

    def empty(self, thread: int, job: TierJob, position: int, at: int) -> None:
        """Copy it to its buffer."""
        begin = (thread * self._most + at) * self._row_bytes
        job.buffers[position][:] = self._buffer[begin : begin + self._row_bytes]
