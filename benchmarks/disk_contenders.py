"""Those whose speed ``disk.py`` compares: our tier, our tier without index and proofs, fio, vLLM's ``fs`` tier.

Each stores and loads the same rows; ours and the bare calls from and into a pool, fio and vLLM's tier from and into
memory of their own. Decides how each is driven.
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

from kvtier_core import Sealer
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.testing.driving import TierDriver
from kvtier_core.transfer import Pool, PoolGeometry
from kvtier_disk import DiskTier

_NAMESPACE = "bench"
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
        self._pool = Pool.create(PoolGeometry(num_rows=self.count, row_bytes=row_bytes), huge_pages=True)
        self._pool.prefault().wait(_PREFAULT_S)
        self.array = self._pool.rows_array.reshape(-1)
        self.array[:] = np.random.default_rng(0).integers(0, 256, self.total_bytes, np.uint8)
        self.sealer = Sealer(_NAMESPACE)

    def view(self, index: int) -> memoryview:
        """One row."""
        return self._pool.row(index)

    def keys(self, number: int) -> list[OffloadKey]:
        """The keys of one round: like hashes, in no order."""
        rng = np.random.default_rng([number, self.row_bytes])
        return [make_offload_key(rng.bytes(32), 0) for _ in range(self.count)]

    def seal(self, keys: Sequence[OffloadKey], first: int = 0) -> None:
        """Give each row its proof."""
        for index, key in enumerate(keys):
            self.sealer.seal(key, self.view(first + index), self.row_bytes - 64)

    def check(self, keys: Sequence[OffloadKey], first: int = 0) -> None:
        """Raise unless each row has its proof."""
        for index, key in enumerate(keys):
            if not self.sealer.check(key, self.view(first + index), self.row_bytes - 64):
                raise RuntimeError(f"row {first + index} came back wrong")

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
        self._pool.close()  # a row that is still about keeps it, until the process ends


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


def _timed(work: Callable[[], object]) -> Measured:
    gc.collect()  # what the preparations left is not the work's
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    kernel_s = after.ru_stime - before.ru_stime
    return Measured(seconds, after.ru_utime - before.ru_utime + kernel_s, kernel_s)


class Ours:
    """The disk tier through the core's adapter. With *proofs* they are made and checked as the core does, beside it."""

    def __init__(self, directory: Path, threads: int, *, proofs: bool = False) -> None:
        self._threads = threads
        self.name = "ours_with_proofs" if proofs else "ours"
        self._root = directory / self.name
        self._proofs = proofs

    def _open(self, rows: Rows) -> TierDriver:
        values = {"type": "disk", "root": self._root, "min_free": 0, "threads": self._threads}
        settings = DiskTier.Settings.model_validate(values)
        # Room for two rounds: from the third on, slots are recycled.
        capacity = int(2.1 * rows.total_bytes) + (160 << 20)
        driver = TierDriver(
            DiskTier, settings, row_bytes=rows.row_bytes, namespace=_NAMESPACE, capacity_bytes=capacity
        )
        driver.poll_s = (
            1.0  # the tier wakes its host, as it does in the core: looking oftener only costs time
        )
        return driver

    def store(self, rows: Rows, number: int) -> Measured:
        """Store all rows."""
        keys = rows.keys(number)
        rows.seal(keys)
        with self._open(rows) as driver:

            def work() -> None:
                jobs = []
                for job in rows.jobs():
                    if self._proofs:
                        rows.seal([keys[index] for index in job], job.start)
                    jobs.append(driver.start_store({keys[index]: rows.view(index) for index in job}))
                for job_id in jobs:
                    result = driver.wait(job_id)
                    if result.error is not None:
                        raise RuntimeError(result.error)

            return _timed(work)

    def load(self, rows: Rows, number: int) -> Measured:
        """Load all rows."""
        keys = rows.keys(number)
        rows.wipe()
        with self._open(rows) as driver:

            def work() -> None:
                jobs = [
                    (
                        job,
                        driver.start_load(
                            [keys[index] for index in job], [rows.view(index) for index in job]
                        ),
                    )
                    for job in rows.jobs()
                ]
                for job, job_id in jobs:
                    result = driver.wait(job_id)
                    if result.error is not None or result.missing:
                        raise RuntimeError(result.error or f"{len(result.missing)} blocks are missing")
                    if self._proofs:
                        rows.check([keys[index] for index in job], job.start)

            measured = _timed(work)
        rows.check(keys)
        return measured

    def clear(self) -> None:
        """Nothing: what is stored is evicted in time."""

    def close(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self._root, ignore_errors=True)


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
            return _timed(work)
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
