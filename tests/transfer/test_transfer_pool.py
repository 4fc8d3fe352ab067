"""The pool: geometry, sharing, closing, and what a killed process leaves."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_core.transfer import SCHEDULER, Direction, Pool, PoolGeometry
from kvtier_core.transfer import memory as memory_module
from kvtier_core.transfer.memory import MemoryLimit

MakePool = Callable[..., Pool]


def test_rows_are_zero_page_aligned_and_apart(make_pool: MakePool) -> None:
    pool = make_pool(num_rows=3, row_bytes=8192)
    assert pool.address % 4096 == 0
    assert pool.rows_array.shape == (3, 8192)
    assert not pool.rows_array.any()
    for index in range(3):
        pool.row(index)[:] = bytes([index + 1]) * 8192
    assert [set(pool.rows_array[index].tolist()) for index in range(3)] == [{1}, {2}, {3}]


def test_a_row_is_no_copy_and_does_not_touch_the_control_page(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.control.note_member(SCHEDULER)
    pool.row(0)[0] = 255
    assert pool.rows_array[0, 0] == 255
    pool.rows_array[:] = 7
    assert bytes(pool.row(7)) == b"\x07" * 8192
    assert pool.control.has_come(SCHEDULER)


@pytest.mark.parametrize("index", [-1, 8])
def test_a_row_outside_the_pool_is_an_index_error(make_pool: MakePool, index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} is not one of the pool's 8"):
        make_pool().row(index)


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "num_workers"),
    [(0, 4096, 1), (1, 4096, 0), (1, 0, 1), (1, 4095, 1), (1, 6144, 1), (-1, 4096, 1), (1, -4096, 1)],
)
def test_an_impossible_geometry_is_refused(num_rows: int, row_bytes: int, num_workers: int) -> None:
    with pytest.raises(ValueError, match="PoolGeometry"):
        PoolGeometry(num_rows=num_rows, row_bytes=row_bytes, num_workers=num_workers)


@pytest.mark.parametrize(("num_workers", "pages"), [(1, 1), (30, 1), (31, 2), (62, 2), (63, 3)])
def test_the_control_page_grows_with_the_workers(num_workers: int, pages: int) -> None:
    geometry = PoolGeometry(num_rows=1, row_bytes=4096, num_workers=num_workers)
    assert geometry.rows_offset == pages * 4096


def test_the_last_of_many_workers_does_not_write_into_row_0(make_pool: MakePool) -> None:
    pool = make_pool(num_workers=126)
    pool.control.announce(125, Direction.LOAD, 1)
    pool.control.finish(125, Direction.LOAD, 1)
    assert not pool.rows_array.any()
    assert pool.control.get_last_finished(125, Direction.LOAD) == 1


def test_b20_a_small_pool_is_told_in_units_of_its_own_size() -> None:
    text = PoolGeometry(num_rows=256, row_bytes=4096).describe()
    assert text == "a pool of 1.0 MiB (256 rows of 4096 bytes)"


def test_a_pool_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> int:
        raise AssertionError("memory was asked for all the same")

    monkeypatch.setattr(memory_module, "find_memory_limit", lambda: MemoryLimit(bytes=2**20, source="here"))
    monkeypatch.setattr(os, "memfd_create", never)
    with pytest.raises(MemoryError, match=r"\(256 rows of 4096 bytes\) does not fit: here leaves 1.0 MiB"):
        Pool.create(PoolGeometry(num_rows=256, row_bytes=4096))


def test_a_pool_that_just_fits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = PoolGeometry(num_rows=255, row_bytes=4096)
    limit = MemoryLimit(bytes=geometry.total_bytes, source="here")
    monkeypatch.setattr(memory_module, "find_memory_limit", lambda: limit)
    with Pool.create(geometry) as pool:
        assert pool.rows_array.shape == (255, 4096)


def test_a_pool_beyond_this_machine_is_refused() -> None:
    with pytest.raises(MemoryError, match="does not fit"):
        Pool.create(PoolGeometry(num_rows=2**30, row_bytes=2**20))


def test_what_the_kernel_refuses_is_a_memory_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(MemoryError, match="the kernel refused"):
        Pool.create(PoolGeometry(num_rows=1, row_bytes=4096))
    assert set(os.listdir("/proc/self/fd")) == before


def test_nobody_can_resize_the_pool_under_its_readers(make_pool: MakePool) -> None:
    pool = make_pool()
    for size in (0, 2 * pool.geometry.total_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_the_descriptor_does_not_leak_into_other_programs(make_pool: MakePool) -> None:
    assert not os.get_inheritable(make_pool().fd)


def test_close_may_be_called_again_and_ends_every_use(make_pool: MakePool) -> None:
    pool = make_pool()
    assert pool.close()
    assert pool.close()
    for use in (lambda: pool.row(0), lambda: pool.rows_array, lambda: pool.fd, lambda: pool.address):
        with pytest.raises(ValueError, match="closed|released"):
            use()
    with pytest.raises(ValueError, match="released"):
        pool.control.note_member(SCHEDULER)


def test_c34_close_keeps_the_mapping_while_rows_are_in_use(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    row, array = pool.row(1), pool.rows_array
    assert not pool.close()
    assert "kept" in caplog.text
    row[0] = 1
    assert array[1, 0] == 1
    del array
    assert not pool.close()
    row.release()
    assert pool.close()


_HOLDER = """
import os, sys
from kvtier_core.transfer.pool import Pool, PoolGeometry
pool = Pool.create(PoolGeometry(num_rows=int(sys.argv[1]), row_bytes=1 << 20))
pool.rows_array[:] = 1
print(f"/proc/{os.getpid()}/fd/{pool.fd}", flush=True)
sys.stdin.read()
"""


class _Holder:
    """Another process with a filled pool of *mebibytes*."""

    def __init__(self, mebibytes: int) -> None:
        command = [sys.executable, "-c", _HOLDER, str(mebibytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.path = self.process.stdout.readline().strip()

    def maps(self) -> list[str]:
        lines = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return [line for line in lines if "memfd:" in line or "/dev/shm" in line]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def _shared_memory_kib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


def test_c32_sigkill_leaves_no_name_and_no_memory() -> None:
    # Other processes take and free shared memory too: one clear drop in a few tries is the proof.
    mebibytes = 256
    drops = []
    for _ in range(5):
        holder = _Holder(mebibytes)
        (mapping,) = holder.maps()
        assert "/memfd:kvtier-pool (deleted)" in mapping  # no name anywhere, /dev/shm included
        assert Path(holder.path).exists()
        before = _shared_memory_kib()
        holder.kill()
        drops.append(before - _shared_memory_kib())
        assert not Path(holder.path).exists()
        if drops[-1] > mebibytes * 1024 * 0.9:
            return
    pytest.fail(f"a killed process's {mebibytes} MiB did not come back: shared memory fell by {drops} KiB")
