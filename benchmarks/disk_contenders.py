"""Those that ``disk.py`` compares our tier with: bare calls, fio, vLLM's ``fs`` tier.

Each stores and loads the same rows; the bare calls from and into a pool, fio and vLLM's tier from and into memory of
their own. Decides how each is driven.
"""

import gc
import json
import os
import queue
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.proof import PROOF_BYTES
from kvtier_core.tier import Sealer
from kvtier_core.transfer import Pool, PoolGeometry

NAMESPACE = "bench"
_PREFAULT_S = 60.0


@dataclass(frozen=True)
class Measured:
    """How long one pass took, and how much of the processors' time; of that, how much in the kernel, where known."""

    seconds: float
    cpu_s: float
    kernel_s: float | None = None


class Rows:
    """A pool of random rows, sealed under keys that are new in every round."""

    def __init__(self, row_bytes: int, total_bytes: int, job_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.count = total_bytes // row_bytes
        self.total_bytes = self.count * row_bytes
        self.per_job = max(1, job_bytes // row_bytes)
        self.pool = Pool.create(PoolGeometry(num_rows=self.count, row_bytes=row_bytes), huge_pages=True)
        self.pool.prefault().wait(_PREFAULT_S)
        self.array = self.pool.rows_array.reshape(-1)
        self.array[:] = np.random.default_rng(0).integers(0, 256, self.total_bytes, np.uint8)
        self.sealer = Sealer(NAMESPACE)

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

    def seal(self, keys: Sequence[OffloadKey]) -> None:
        """Give each row its proof."""
        for index, key in enumerate(keys):
            self.sealer.seal(key, self.view(index), self.payload_bytes)

    def check(self, keys: Sequence[OffloadKey]) -> None:
        """Raise unless each row has its proof."""
        for index, key in enumerate(keys):
            if not self.sealer.check(key, self.view(index), self.payload_bytes):
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


class Bare:
    """As many threads, the same calls and syncs into one preallocated file, and nothing else."""

    name = "bare"

    def __init__(self, directory: Path, threads: int) -> None:
        self._threads = threads
        self._path = directory / "bare"

    def store(self, rows: Rows, number: int) -> Measured:  # noqa: ARG002 - the same in every round
        """Store all rows."""
        return self._move(rows, os.pwritev, sync=True)

    def load(self, rows: Rows, number: int) -> Measured:  # noqa: ARG002
        """Load all rows."""
        return self._move(rows, os.preadv, sync=False)

    def _move(
        self, rows: Rows, call: Callable[[int, Sequence[memoryview], int], int], *, sync: bool
    ) -> Measured:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(fd, 0, rows.total_bytes)
        jobs: queue.SimpleQueue[range | None] = queue.SimpleQueue()

        def serve() -> None:
            while (job := jobs.get()) is not None:
                size = call(fd, [rows.view(index) for index in job], job.start * rows.row_bytes)
                if size != len(job) * rows.row_bytes:
                    raise RuntimeError("short")
                if sync:
                    os.fdatasync(fd)

        def work() -> None:
            threads = [threading.Thread(target=serve) for _ in range(self._threads)]
            for item in (*rows.jobs(), *[None] * self._threads):
                jobs.put(item)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        try:
            return timed(work)
        finally:
            os.close(fd)

    def clear(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Leave nothing."""
        self._path.unlink(missing_ok=True)


class Fio:
    """fio with as many bytes and blocks of the same size, past the page cache, 16 requests in flight, and one sync."""

    name = "fio"

    def __init__(self, directory: Path) -> None:
        self._path = directory / self.name

    def store(self, rows: Rows, number: int) -> Measured:  # noqa: ARG002 - the same in every round
        """Store all rows."""
        return self._run(rows, "write")

    def load(self, rows: Rows, number: int) -> Measured:  # noqa: ARG002
        """Load all rows."""
        return self._run(rows, "read")

    def _way(self, rows: Rows) -> list[str]:
        """How fio moves the rows."""
        return [
            f"--bs={rows.row_bytes}", f"--size={rows.total_bytes}", "--ioengine=io_uring", "--iodepth=16",
            "--end_fsync=1",
        ]  # fmt: skip

    def _run(self, rows: Rows, what: str) -> Measured:
        command = [
            "fio", "--name=bench", f"--filename={self._path}", f"--rw={what}", "--direct=1", "--overwrite=1",
            "--output-format=json", *self._way(rows),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        seconds = max(job["job_runtime"] for job in jobs) / 1e3
        user_s, kernel_s = (
            sum(job[part] / 100 * job["job_runtime"] / 1e3 for job in jobs) for part in ("usr_cpu", "sys_cpu")
        )
        return Measured(seconds, user_s + kernel_s, kernel_s)

    def clear(self) -> None:
        """Nothing: the file is written over."""

    def close(self) -> None:
        """Leave nothing."""
        self._path.unlink(missing_ok=True)


class FioSynced(Fio):
    """fio as a tier has to work: so many threads with one call in flight each, of a job's size, and a sync after it."""

    name = "fio_synced"

    def __init__(self, directory: Path, threads: int) -> None:
        super().__init__(directory)
        self._threads = threads

    def _way(self, rows: Rows) -> list[str]:
        calls = -(-rows.total_bytes // (rows.per_job * rows.row_bytes))
        threads = min(self._threads, calls)
        share = calls // threads * rows.per_job * rows.row_bytes
        return [
            f"--bs={rows.per_job * rows.row_bytes}", f"--size={share}", f"--offset_increment={share}",
            f"--numjobs={threads}", "--thread", "--ioengine=psync", "--fdatasync=1",
        ]  # fmt: skip


class Vllm:
    """vLLM's ``fs`` tier through its own manager, in an interpreter that has vLLM."""

    name = "vllm"

    def __init__(self, directory: Path, python: str) -> None:
        self._root = directory / "vllm"
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def _ask(self, rows: Rows, what: str, number: int) -> Measured:
        if self._process is None:
            self._process = subprocess.Popen(
                [self._python, Path(__file__).with_name("disk_vllm.py"), self._root],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._tell({"row_bytes": rows.row_bytes, "count": rows.count, "per_job": rows.per_job})
        answer = self._tell({"what": what, "keys": [key.hex() for key in rows.keys(number)]})
        return Measured(answer["seconds"], answer["cpu_s"])

    def _tell(self, order: dict[str, object]) -> dict[str, float]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        return self._ask(rows, "store", number)

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        return self._ask(rows, "load", number)

    def clear(self) -> None:
        """Remove the blocks' files: nothing else would."""
        self._tell({"what": "clear"})

    def close(self) -> None:
        """Leave nothing."""
        if self._process is not None:
            self._process.communicate(timeout=60)
        shutil.rmtree(self._root, ignore_errors=True)
