"""Those that ``disk.py`` compares our tier with, beside the bare calls: fio and vLLM's ``fs`` tier.

Each stores and loads as many bytes, from and into memory of its own. Decides how each is driven.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvtier_testing.bench.rows import Measured, Rows


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


class Elsewhere:
    """A program in another interpreter, with memory of its own, told over a pipe what to store and load."""

    def __init__(self, name: str, command: Sequence[str | Path], **first: object) -> None:
        """*first* is told before all else, beside the rows' size and number, and how many a job has."""
        self.name = name
        self._command = command
        self._first = first
        self._process: subprocess.Popen[str] | None = None

    def _ask(self, rows: Rows, what: str, number: int) -> Measured:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            shape = {"row_bytes": rows.row_bytes, "count": rows.count, "per_job": rows.per_job}
            self._tell({**shape, **self._first})
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
        """Remove the blocks: nothing else would."""
        self._tell({"what": "clear"})

    def close(self) -> None:
        """Leave nothing."""
        if self._process is not None:
            self._process.communicate(timeout=60)


class Vllm(Elsewhere):
    """vLLM's ``fs`` tier through its own manager, in an interpreter that has vLLM."""

    def __init__(self, directory: Path, python: str) -> None:
        self._root = directory / "vllm"
        super().__init__("vllm", [python, Path(__file__).with_name("disk_vllm.py"), self._root])

    def close(self) -> None:
        """Leave nothing."""
        super().close()
        shutil.rmtree(self._root, ignore_errors=True)
