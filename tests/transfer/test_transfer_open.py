"""Pool.open within one process: who is first, who does not belong, what does not fit."""

import contextlib
import errno
import mmap
import os
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_core.transfer import SCHEDULER, Pool, PoolGeometry
from kvtier_core.transfer import memory as memory_module
from kvtier_core.transfer.memory import MemoryLimit
from tests.transfer.conftest import TIMEOUT_S, missing

_GEOMETRY = PoolGeometry(num_rows=4, row_bytes=4096, num_workers=2)

OpenPool = Callable[..., Pool]


def _pool_descriptors() -> list[str]:
    """Open files of pools."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [entry.name] if "kvtier" in os.readlink(entry) else []
    return sorted(found)


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def open_pool(name: str) -> Iterator[OpenPool]:
    pools: list[Pool] = []

    def open_one(member: int, geometry: PoolGeometry = _GEOMETRY) -> Pool:
        pools.append(Pool.open(geometry, name, member))
        return pools[-1]

    yield open_one
    for pool in pools:
        assert pool.close()


def test_c43_members_of_one_name_share_rows_and_control_page(open_pool: OpenPool, name: str) -> None:
    zero, one, scheduler = (open_pool(member) for member in (0, 1, SCHEDULER))
    one.row(2)[0] = 7
    scheduler.control.note_member(0)
    assert zero.row(2)[0] == 7
    assert one.control.has_come(0)
    for pool in (one, scheduler, zero):
        pool.wait_for_members(TIMEOUT_S)
        assert missing(pool) == []
    zero.close()
    assert missing(one) == [0]


def test_c43_a_member_that_does_not_come_is_named(open_pool: OpenPool) -> None:
    pool = open_pool(0)
    with pytest.raises(
        TimeoutError, match="the scheduler, worker 1 did not join .* must run on this machine"
    ):
        pool.wait_for_members(0.0)


def test_a_member_that_is_there_already_is_refused(open_pool: OpenPool) -> None:
    open_pool(0)
    before = _pool_descriptors()
    with pytest.raises(FileExistsError, match="worker 0 of this pool is already there"):
        open_pool(0)
    assert _pool_descriptors() == before
    pools = [open_pool(member) for member in (1, SCHEDULER)]
    for pool in pools:
        pool.wait_for_members(TIMEOUT_S)  # the one that was refused took nobody's place


def test_a_member_the_pool_does_not_have_is_refused(open_pool: OpenPool) -> None:
    open_pool(0)
    with pytest.raises(ValueError, match="worker 2 is not one of this pool's 2 workers"):
        open_pool(2)


def test_another_geometry_under_the_same_name_is_refused(open_pool: OpenPool) -> None:
    open_pool(0)
    before = _pool_descriptors()
    other = PoolGeometry(num_rows=5, row_bytes=4096, num_workers=2)
    with pytest.raises(ValueError, match=r"num_rows=4.* expects .*num_rows=5"):
        open_pool(1, other)
    assert _pool_descriptors() == before


@pytest.mark.parametrize("bad", ["", "a/b", "../x", "a b", "x" * 65, "a\0b", "ä"])
def test_a_name_that_could_be_a_path_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="is no name for a pool"):
        Pool.open(_GEOMETRY, bad)


def test_c43_a_pool_of_one_process_misses_nobody(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(num_workers=3)
    pool.wait_for_members(0.0)


def test_many_that_come_at_once_meet(name: str) -> None:
    geometry = PoolGeometry(num_rows=1, row_bytes=4096, num_workers=12)
    for _ in range(10):
        pools: dict[int, Pool] = {}
        ready = threading.Barrier(13)

        def come(member: int, pools: dict[int, Pool] = pools, ready: threading.Barrier = ready) -> None:
            ready.wait(TIMEOUT_S)
            pools[member] = Pool.open(geometry, name, member)

        threads = [threading.Thread(target=come, args=(member,)) for member in range(-1, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        pools[0].row(0)[0] = 5
        for pool in pools.values():
            pool.wait_for_members(TIMEOUT_S)
            assert pool.row(0)[0] == 5
        for pool in pools.values():
            assert pool.close()


def test_anonymous_memory_that_does_not_fit_is_refused_and_the_name_is_free_again(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(memory_module, "find_memory_limit", lambda: MemoryLimit(bytes=8192, source="here"))
        with pytest.raises(MemoryError, match="does not fit: here leaves"):
            open_pool(0)
    open_pool(0)


def test_what_can_not_be_mapped_is_a_memory_error_that_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "beyond RLIMIT_AS")

    before = _pool_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        with pytest.raises(MemoryError, match="refused to map a pool of .*beyond RLIMIT_AS"):
            Pool.open(_GEOMETRY, name, 0)
    assert _pool_descriptors() == before


def test_b17_a_member_that_came_and_left_is_not_said_to_have_stayed_away(open_pool: OpenPool) -> None:
    worker = open_pool(0)
    scheduler = open_pool(SCHEDULER)
    assert worker.close()
    with pytest.raises(
        TimeoutError,
        match=r"^worker 0 joined the pool and left it again: see .* why it ended; worker 1 did not join .* container",
    ):
        scheduler.wait_for_members(0.0)


def test_who_waits_for_a_pool_that_nobody_makes_is_told_so(name: str) -> None:
    with pytest.raises(TimeoutError, match=f"nobody made the pool '{name}' within 0 s"):
        Pool.open(None, name, timeout_s=0.0)


def test_a_shared_pools_descriptors_do_not_leak_into_other_programs(open_pool: OpenPool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for member in (0, SCHEDULER):
        open_pool(member)
    kept = {
        entry
        for entry in set(os.listdir("/proc/self/fd")) - before
        if Path(f"/proc/self/fd/{entry}").exists()
    }
    assert len(kept) >= 4, "the memory and the locks, of two"
    assert not [entry for entry in kept if os.get_inheritable(int(entry))]


def test_c43_worker_0_leaves_a_note_and_who_does_not_know_the_geometry_waits_for_it(name: str) -> None:
    found: list[Pool] = []
    thread = threading.Thread(target=lambda: found.append(Pool.open(None, name, timeout_s=TIMEOUT_S)))
    thread.start()
    with Pool.open(_GEOMETRY, name, 0, note=b"from 0") as first:
        thread.join(TIMEOUT_S)
        with found[0] as scheduler:
            assert scheduler.geometry == _GEOMETRY
            assert scheduler.note == first.note == b"from 0"


def test_c43_only_one_of_two_that_make_a_pool_at_once_keeps_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither sees the other's memory when it looks for one."""
    both_looked = threading.Barrier(2)
    looks = threading.local()
    find = memory_module.find_memory

    def find_first_together(*arguments: Any) -> int | None:
        found = find(*arguments)
        if not hasattr(looks, "first"):
            looks.first = found
            both_looked.wait(TIMEOUT_S)
        return found

    monkeypatch.setattr("kvtier_core.transfer.pool.find_memory", find_first_together)
    before = _pool_descriptors()
    ended: list[Pool | BaseException] = []

    def come() -> None:
        try:
            ended.append(Pool.open(_GEOMETRY, name, 0))
        except BaseException as error:  # noqa: BLE001 - looked at below
            ended.append(error)

    threads = [threading.Thread(target=come) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    errors = [end for end in ended if isinstance(end, FileExistsError)]
    pools = [end for end in ended if isinstance(end, Pool)]
    assert len(errors) + len(pools) == 2
    assert errors, "both would have a pool of their own"
    for pool in pools:
        assert pool.close()
    assert _pool_descriptors() == before


def test_a_note_has_a_limit(name: str) -> None:
    with pytest.raises(ValueError, match="longer than"):
        Pool.open(_GEOMETRY, name, 0, note=bytes(70_000))


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_s5_c38_a_pools_memory_is_its_users_alone_whatever_the_umask(open_pool: OpenPool, umask: int) -> None:
    before = os.umask(umask)
    try:
        pool = open_pool(0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.fstat(pool.fd).st_mode) == 0o600
