"""What each contender of a benchmark stores and loads: random rows of a pool, under new keys in every round."""

import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.proof import PROOF_BYTES, Sealer
from kvtier_core.transfer.pool import Pool, PoolGeometry

NAMESPACE = "bench"
_PREFAULT_S = 60.0


@dataclass(frozen=True)
class Measured:
    """How long one pass took, and how much of the processors' time; of that, how much in the kernel, where known."""

    seconds: float
    cpu_s: float
    kernel_s: float | None = None


class Rows:
    """A pool of random rows, sealed for a namespace under keys that are new in every round."""

    def __init__(self, row_bytes: int, total_bytes: int, job_bytes: int, namespace: str = NAMESPACE) -> None:
        self.row_bytes = row_bytes
        self.count = total_bytes // row_bytes
        self.total_bytes = self.count * row_bytes
        self.per_job = max(1, job_bytes // row_bytes)
        self.pool = Pool.create(PoolGeometry(num_rows=self.count, row_bytes=row_bytes), huge_pages=True)
        self.pool.prefault().wait(_PREFAULT_S)
        self.array = self.pool.rows_array.reshape(-1)
        self.array[:] = np.random.default_rng(0).integers(0, 256, self.total_bytes, np.uint8)
        self.sealer = Sealer(namespace)

    def view(self, index: int) -> memoryview:
        """One row."""
        return self.pool.row(index)

    def keys(self, number: int) -> list[OffloadKey]:
        """The keys of one round: like hashes, in no order."""
        rng = np.random.default_rng([number, self.row_bytes])
        return [make_offload_key(rng.bytes(32), 0) for _ in range(self.count)]

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row without its proof."""
        return self.row_bytes - PROOF_BYTES

    def seal(self, keys: Sequence[OffloadKey], some: Sequence[int] | None = None) -> None:
        """Give each row its proof, or *some* rows."""
        for index in range(self.count) if some is None else some:
            self.sealer.seal(keys[index], self.view(index), self.payload_bytes)

    def check(self, keys: Sequence[OffloadKey], some: Sequence[int] | None = None) -> None:
        """Raise unless each row has its proof, or each of *some* rows."""
        for index in range(self.count) if some is None else some:
            if not self.sealer.check(keys[index], self.view(index), self.payload_bytes):
                raise RuntimeError(f"row {index} came back wrong")

    def jobs(self) -> Iterator[range]:
        """The rows of each job."""
        for begin in range(0, self.count, self.per_job):
            yield range(begin, min(begin + self.per_job, self.count))

    def wipe(self) -> None:
        """So that nothing that was not loaded looks loaded."""
        self.array[:: self.row_bytes] ^= 0xFF
        self.array[self.row_bytes - 1 :: self.row_bytes] ^= 0xFF

    def close(self) -> None:
        """Free the memory."""
        del self.array
        gc.collect()
        self.pool.close()  # a row that is still about keeps it, until the process ends


class Contender(Protocol):
    """Stores and loads all rows of a round. ``clear`` comes after each round."""

    name: str

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        ...

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        ...

    def clear(self) -> None:
        """The round is over."""
        ...

    def close(self) -> None:
        """Leave nothing."""
        ...


def timed(work: Callable[[], object]) -> Measured:
    """What *work* takes."""
    gc.collect()  # what the preparations left is not the work's
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    kernel_s = after.ru_stime - before.ru_stime
    return Measured(seconds, after.ru_utime - before.ru_utime + kernel_s, kernel_s)
