"""Pool.open within one process: who is first, who does not belong, what does not fit."""

import contextlib
import errno
import mmap
import os
import socket
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_core.transfer import SCHEDULER, Pool, PoolGeometry
from kvtier_core.transfer import handover as handover_module
from kvtier_core.transfer import pool as pool_module
from kvtier_core.transfer import region as region_module
from kvtier_core.transfer.handover import meet
from kvtier_core.transfer.members import Members
from kvtier_core.transfer.memory import MemoryLimit
from tests.transfer.conftest import TIMEOUT_S

_GEOMETRY = PoolGeometry(num_rows=4, row_bytes=4096, num_workers=2)

_JOIN: Callable[[int], None] = lambda _fd: None  # noqa: E731 - nothing to do

OpenPool = Callable[..., Pool]


def _pool_descriptors() -> list[str]:
    """Open files of pools. Sockets come and go with the thread that hands a pool over."""
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

    def open_one(member: int, geometry: PoolGeometry = _GEOMETRY, *, named: bool = False) -> Pool:
        pools.append(Pool.open(geometry, name, member, named=named))
        return pools[-1]

    yield open_one
    for pool in pools:
        assert pool.close()


@pytest.fixture(params=[False, True], ids=["anonymous", "named"])
def named(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_c43_members_of_one_name_share_rows_and_control_page(
    open_pool: OpenPool, name: str, *, named: bool
) -> None:
    one, scheduler, zero = (open_pool(member, named=named) for member in (1, SCHEDULER, 0))
    one.row(2)[0] = 7
    scheduler.control.bump_epoch()
    assert zero.row(2)[0] == 7
    assert one.control.epoch == 1
    for pool in (one, scheduler, zero):
        pool.wait_for_members(TIMEOUT_S)
        assert pool.missing_members() == []
    assert not [entry for entry in os.listdir("/dev/shm") if name in entry]
    zero.close()
    assert one.missing_members() == [0]


def test_c43_a_member_that_does_not_come_is_named(open_pool: OpenPool, *, named: bool) -> None:
    pool = open_pool(0, named=named)
    with pytest.raises(
        TimeoutError, match="the scheduler, worker 1 did not join .* must run on this machine"
    ):
        pool.wait_for_members(0.0)


def test_a_member_that_is_there_already_is_refused(open_pool: OpenPool, *, named: bool) -> None:
    open_pool(0, named=named)
    before = _pool_descriptors()
    with pytest.raises(FileExistsError, match="worker 0 of this pool is already there"):
        open_pool(0, named=named)
    assert _pool_descriptors() == before
    pools = [open_pool(member, named=named) for member in (1, SCHEDULER)]
    for pool in pools:
        pool.wait_for_members(TIMEOUT_S)  # the one that was refused took nobody's place


def test_a_member_the_pool_does_not_have_is_refused(open_pool: OpenPool, *, named: bool) -> None:
    with pytest.raises(ValueError, match="worker 2 is not one of this pool's 2 workers"):
        open_pool(2, named=named)


def test_another_geometry_under_the_same_name_is_refused(open_pool: OpenPool, *, named: bool) -> None:
    open_pool(SCHEDULER, named=named)
    before = _pool_descriptors()
    other = PoolGeometry(num_rows=5, row_bytes=4096, num_workers=2)
    with pytest.raises(ValueError, match=r"num_rows=4.* expects .*num_rows=5"):
        open_pool(0, other, named=named)
    assert _pool_descriptors() == before


@pytest.mark.parametrize("bad", ["", "a/b", "../x", "a b", "x" * 65, "a\0b", "ä"])
def test_a_name_that_could_be_a_path_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="is no name for a pool"):
        Pool.open(_GEOMETRY, bad)


def test_c43_a_pool_of_one_process_misses_nobody(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(num_workers=3)
    assert pool.missing_members() == []
    pool.wait_for_members(0.0)


def test_many_that_come_at_once_meet(name: str, *, named: bool) -> None:
    geometry = PoolGeometry(num_rows=1, row_bytes=4096, num_workers=12)
    for _ in range(10):
        pools: dict[int, Pool] = {}
        ready = threading.Barrier(13)

        def come(member: int, pools: dict[int, Pool] = pools, ready: threading.Barrier = ready) -> None:
            ready.wait(TIMEOUT_S)
            pools[member] = Pool.open(geometry, name, member, named=named)

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


def test_k8_o1_named_memory_that_does_not_fit_is_refused_before_a_byte_is_touched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = MemoryLimit(bytes=2**60, source="here")
    monkeypatch.setattr(region_module, "find_memory_limit", lambda: endless)
    room = os.statvfs(region_module.SHARED_MEMORY)
    too_much = PoolGeometry(num_rows=room.f_blocks * room.f_frsize // 4096 + 1, row_bytes=4096)
    before = _pool_descriptors()
    with pytest.raises(MemoryError, match=f"the kernel refused a pool of .* named /dev/shm/.*{name}"):
        Pool.open(too_much, name, named=True)
    assert _pool_descriptors() == before
    assert not [entry for entry in os.listdir("/dev/shm") if name in entry]


def test_anonymous_memory_that_does_not_fit_is_refused_and_the_name_is_free_again(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(region_module, "find_memory_limit", lambda: MemoryLimit(bytes=8192, source="here"))
        with pytest.raises(MemoryError, match="does not fit: here leaves"):
            open_pool(SCHEDULER)
    open_pool(SCHEDULER)


def _leave_dead(path: Path) -> None:
    """What a process leaves that died while it made a named pool."""
    path.touch(mode=0o600)
    path.write_bytes(_GEOMETRY.pack())


def test_k8_o1_named_memory_of_the_dead_is_replaced_and_of_the_living_kept(
    open_pool: OpenPool, name: str
) -> None:
    path = region_module.name_in_shared_memory(name)
    _leave_dead(path)
    pool = open_pool(SCHEDULER, named=True)
    assert pool.row(3)[0] == 0
    inode = path.stat().st_ino
    pool.row(3)[0] = 9
    assert open_pool(0, named=True).row(3)[0] == 9
    assert path.stat().st_ino == inode


def test_k8_o1_named_memory_of_the_dead_under_any_name_is_reclaimed(
    open_pool: OpenPool, name: str, caplog: pytest.LogCaptureFixture, *, named: bool
) -> None:
    dead = region_module.name_in_shared_memory(f"{name}-dead")
    live_path = region_module.name_in_shared_memory(f"{name}-live")
    with Pool.open(_GEOMETRY, f"{name}-live", named=True) as live:
        _leave_dead(dead)
        open_pool(SCHEDULER, named=named)
        assert not dead.exists()
        assert f"removed {dead}" in caplog.text
        assert live_path.exists()
        assert live.row(0)[0] == 0
    _leave_dead(dead)
    Pool.create(_GEOMETRY).close()
    assert not dead.exists()


def test_c32_what_its_owner_closed_meanwhile_is_not_said_to_be_a_dead_ones(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = Pool.open(_GEOMETRY, f"{name}-other", named=True)
    real = Members.of

    def look(fd: int, num_workers: int) -> Members:
        assert other.close()
        return real(fd, num_workers)

    with monkeypatch.context() as patched:
        patched.setattr(Members, "of", look)
        region_module.reclaim_dead()
    assert not region_module.name_in_shared_memory(f"{name}-other").exists()
    assert name not in caplog.text


def test_c32_what_is_no_pool_of_kvtiers_is_never_removed(name: str, *, named: bool) -> None:
    notes = region_module.name_in_shared_memory(f"{name}-notes.txt")
    pipe = region_module.name_in_shared_memory(f"{name}-pipe")
    notes.touch(mode=0o600)
    notes.write_text("mine")
    os.mkfifo(pipe, mode=0o600)
    try:
        Pool.open(_GEOMETRY, name, named=named).close()
        with pytest.raises(PermissionError, match="name is taken by something that is no pool of kvtier's"):
            Pool.open(_GEOMETRY, f"{name}-notes.txt", named=True)
        with pytest.raises(PermissionError, match="is no regular file"):
            Pool.open(_GEOMETRY, f"{name}-pipe", named=True)
        assert notes.read_text() == "mine"
        assert pipe.exists()
    finally:
        notes.unlink()
        pipe.unlink()


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o640, 0o604])
def test_a_named_pool_that_others_may_use_is_not_joined(open_pool: OpenPool, name: str, mode: int) -> None:
    open_pool(SCHEDULER, named=True)
    path = region_module.name_in_shared_memory(name)
    path.chmod(mode)
    before = _pool_descriptors()
    with pytest.raises(PermissionError, match=f"others may use .mode {mode:o}.*: have it removed"):
        open_pool(0, named=True)
    assert _pool_descriptors() == before


def test_a_named_pool_of_another_user_is_neither_joined_nor_removed(
    open_pool: OpenPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made the file could read the KV, and end its readers by cutting it short (SIGBUS)."""
    open_pool(SCHEDULER, named=True)
    path = region_module.name_in_shared_memory(name)
    with monkeypatch.context() as patched:
        patched.setattr(region_module, "name_in_shared_memory", lambda _name: path)
        patched.setattr(pool_module, "name_in_shared_memory", lambda _name: path)
        patched.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        with pytest.raises(PermissionError, match="belongs to another user"):
            open_pool(0, named=True)
    assert path.exists()


def test_a_pool_of_another_user_is_not_attached(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    owner = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(PermissionError, match="belongs to another user"):
            Pool.attach(pool.path)


def test_a_named_pool_that_was_cut_short_is_refused(open_pool: OpenPool, name: str) -> None:
    open_pool(SCHEDULER, named=True)
    os.truncate(region_module.name_in_shared_memory(name), 8192)
    with pytest.raises(ValueError, match="is damaged"):
        open_pool(0, named=True)


def test_of_several_that_come_at_once_one_takes_the_memory_of_a_named_pool(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take all of it otherwise, and fail where it fits but once."""
    taken: list[int] = []
    real = os.posix_fallocate

    def take(fd: int, offset: int, length: int) -> None:
        taken.append(length)
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", take)
    geometry = PoolGeometry(num_rows=256, row_bytes=4096, num_workers=5)
    pools: list[Pool] = []
    ready = threading.Barrier(6)

    def come(member: int) -> None:
        ready.wait(TIMEOUT_S)
        pools.append(Pool.open(geometry, name, member, named=True))

    threads = [threading.Thread(target=come, args=(member,)) for member in range(-1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert taken == [geometry.total_bytes]
    assert len(pools) == 6
    for pool in pools:
        pool.wait_for_members(TIMEOUT_S)
    for pool in pools:
        assert pool.close()


def test_whoever_comes_while_a_named_pool_takes_its_memory_waits_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_it, go_on = threading.Event(), threading.Event()
    real = os.posix_fallocate

    def take(fd: int, offset: int, length: int) -> None:
        at_it.set()
        assert go_on.wait(TIMEOUT_S)
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", take)
    pools: list[Pool] = []
    thread = threading.Thread(target=lambda: pools.append(Pool.open(_GEOMETRY, name, named=True)))
    thread.start()
    assert at_it.wait(TIMEOUT_S)
    with pytest.raises(TimeoutError, match="other processes hold it"):
        Pool.open(_GEOMETRY, name, 0, named=True, timeout_s=0.0)
    Pool.create(_GEOMETRY).close()  # looks for what the dead left
    go_on.set()
    thread.join(TIMEOUT_S)
    with Pool.open(_GEOMETRY, name, 0, named=True) as worker, pools[0] as scheduler:
        assert worker.row(3)[0] == 0
        assert scheduler.missing_members() == [1]


def test_what_the_machine_has_not_is_refused_to_a_named_pool_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("memory was taken all the same")

    monkeypatch.setattr(region_module, "find_memory_limit", lambda: MemoryLimit(bytes=8192, source="here"))
    monkeypatch.setattr(os, "posix_fallocate", never)
    before = _pool_descriptors()
    with pytest.raises(MemoryError, match=f"named .*{name} does not fit: here leaves"):
        Pool.open(_GEOMETRY, name, named=True)
    assert _pool_descriptors() == before
    assert not region_module.name_in_shared_memory(name).exists()


def test_what_can_not_be_mapped_is_a_memory_error_that_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, *, named: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "beyond RLIMIT_AS")

    before = _pool_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        with pytest.raises(MemoryError, match="refused to map a pool of .*beyond RLIMIT_AS"):
            Pool.open(_GEOMETRY, name, named=named)
    assert _pool_descriptors() == before
    assert not region_module.name_in_shared_memory(name).exists()
    assert name not in Path("/proc/net/unix").read_text()


def test_c32_a_pool_closed_before_all_have_come_leaves_no_name(open_pool: OpenPool, name: str) -> None:
    path = region_module.name_in_shared_memory(name)
    one, two = open_pool(0, named=True), open_pool(1, named=True)
    assert one.close()
    assert path.exists(), "somebody still waits under this name"
    assert two.close()
    assert not path.exists()


def _put_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def _put_directory(path: Path, _elsewhere: Path) -> None:
    path.mkdir()


def _put_socket(path: Path, _elsewhere: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _put_pipe(path: Path, _elsewhere: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("put", [_put_link, _put_directory, _put_socket, _put_pipe])
def test_s19_what_is_no_file_at_the_place_of_a_pool_is_refused_with_advice(
    name: str, tmp_path: Path, put: Callable[[Path, Path], None]
) -> None:
    path = region_module.name_in_shared_memory(name)
    put(path, tmp_path / "elsewhere")
    try:
        with pytest.raises(
            PermissionError, match="no regular file.*: have it removed, or give the pool another name"
        ) as caught:
            Pool.open(_GEOMETRY, name, named=True)
        assert caught.value.filename == str(path)
        region_module.reclaim_dead()
    finally:
        (path.rmdir if path.is_dir() and not path.is_symlink() else path.unlink)()
    assert not (tmp_path / "elsewhere").exists()


def test_b17_a_member_that_came_and_left_is_not_said_to_have_stayed_away(
    open_pool: OpenPool, *, named: bool
) -> None:
    scheduler = open_pool(SCHEDULER, named=named)
    worker = open_pool(0, named=named)
    assert worker.close()
    with pytest.raises(
        TimeoutError,
        match=r"^worker 0 joined the pool and left it again: see .* why it ended; worker 1 did not join .* network",
    ):
        scheduler.wait_for_members(0.0)


def test_another_users_process_is_neither_served_nor_believed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = handover_module._peer_uid
    fd, _, host = meet(name, lambda: os.memfd_create("kvtier-test"), _JOIN, TIMEOUT_S)
    with monkeypatch.context() as patched:
        patched.setattr(handover_module, "_peer_uid", lambda connection: os.geteuid() + 1)
        with pytest.raises(PermissionError, match="held by another user"):
            meet(name, lambda: -1, _JOIN, TIMEOUT_S)
    monkeypatch.setattr(
        handover_module,
        "_peer_uid",
        lambda connection: real(connection) + (threading.current_thread().name == "kvtier-handover"),
    )
    with pytest.raises(TimeoutError, match="did not hand it over"):
        meet(name, lambda: -1, _JOIN, timeout_s=0.1)
    monkeypatch.undo()
    own, _, second = meet(name, lambda: -1, _JOIN, TIMEOUT_S)
    assert os.path.samestat(os.fstat(own), os.fstat(fd))
    for one in (host, host, second):
        one.close()
    os.close(own)
    os.close(fd)


def test_a_guest_that_hangs_up_keeps_nobody_from_coming(name: str) -> None:
    fd, _, host = meet(name, lambda: os.memfd_create("kvtier-test"), _JOIN, TIMEOUT_S)
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
            guest.connect(f"\0kvtier-{os.getuid()}-{name}")
    own, _, second = meet(name, lambda: -1, _JOIN, TIMEOUT_S)
    for one in (host, second):
        one.close()
    os.close(own)
    os.close(fd)


def test_who_waits_for_a_pool_that_nobody_makes_is_told_so(name: str) -> None:
    with pytest.raises(TimeoutError, match=f"nobody made the pool '{name}' within 0 s"):
        Pool.open(None, name, timeout_s=0.0)


def test_descriptors_that_are_handed_over_do_not_leak_into_other_programs(open_pool: OpenPool) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for member in (0, SCHEDULER):
        open_pool(member)
    kept = {
        entry
        for entry in set(os.listdir("/proc/self/fd")) - before
        if Path(f"/proc/self/fd/{entry}").exists()
    }
    assert len(kept) >= 8, "the memory, the locks, the socket and what wakes its thread, of two"
    assert not [entry for entry in kept if os.get_inheritable(int(entry))]


def test_a_handover_that_can_not_start_its_thread_leaves_nothing(
    open_pool: OpenPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            open_pool(SCHEDULER)
    assert os.listdir("/proc/self/fd") == before
    assert name not in Path("/proc/net/unix").read_text()


def test_closing_a_pool_ends_its_handover(open_pool: OpenPool, name: str) -> None:
    first, second = open_pool(0), open_pool(1)
    assert any(thread.name == "kvtier-handover" for thread in threading.enumerate())
    assert first.close()
    assert name in Path("/proc/net/unix").read_text(), "the second answers under it"
    assert second.close()
    assert not any(thread.name == "kvtier-handover" for thread in threading.enumerate())
    assert name not in Path("/proc/net/unix").read_text()


def test_c32_the_gate_keeps_others_out_until_it_is_left(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b"")
    fds = [os.open(path, os.O_RDWR) for _ in range(2)]
    one, two = (Members.of(fd, 1) for fd in fds)
    assert one.enter_gate(0.0)
    assert not two.enter_gate(0.0)
    one.leave_gate()
    assert two.enter_gate(0.0)
    for members in (one, two):
        members.close()
        members.close()
    for fd in fds:
        os.close(fd)


def test_c43_the_first_one_leaves_a_note_and_who_does_not_know_the_geometry_waits_for_it(name: str) -> None:
    found: list[Pool] = []
    thread = threading.Thread(target=lambda: found.append(Pool.open(None, name, timeout_s=TIMEOUT_S)))
    thread.start()
    with Pool.open(_GEOMETRY, name, 0, note=b"from 0") as first:
        thread.join(TIMEOUT_S)
        with found[0] as scheduler:
            assert scheduler.geometry == _GEOMETRY
            assert scheduler.note == first.note == b"from 0"


def test_a_note_has_a_limit_and_a_pool_in_shared_memory_has_none(name: str) -> None:
    with pytest.raises(ValueError, match="longer than"):
        Pool.open(_GEOMETRY, name, 0, note=bytes(70_000))
    with pytest.raises(ValueError, match="carries no note"):
        Pool.open(_GEOMETRY, name, 0, note=b"a", named=True)
    with pytest.raises(ValueError, match="carries no note"):
        Pool.open(None, name, named=True)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_s5_c38_a_pools_memory_is_its_users_alone_whatever_the_umask(
    open_pool: OpenPool, *, named: bool, umask: int
) -> None:
    before = os.umask(umask)
    try:
        pool = open_pool(SCHEDULER, named=named)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.fstat(pool.fd).st_mode) == 0o600
