"""Pools in huge pages: whether the kernel gives them or not, contents stay and the pool works."""

import errno
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_core.transfer import Pool, PoolGeometry, prefault
from kvtier_core.transfer.prefault import HugePages, describe_refusal, map_for_huge_pages

_MIB = 1 << 20
_SIZE = 2 * _MIB
_GEOMETRY = PoolGeometry(num_rows=9, row_bytes=_MIB)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 5 * _MIB)
    yield fd
    os.close(fd)


def huge_bytes(address: int) -> int:
    """What of the mapping at *address* is mapped by huge pages of shared memory."""
    parts = re.split(r"^([0-9a-f]+)-[0-9a-f]+ .*$", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    mappings = dict(zip((int(begin, 16) for begin in parts[1::2]), parts[2::2], strict=True))
    found = re.search(r"ShmemPmdMapped: +(\d+) kB", mappings[address])
    assert found is not None
    return int(found[1]) * 1024


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def advise(_address: int, _length: int, advice: int) -> None:
        if advice != prefault.MADV_POPULATE_WRITE:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(prefault, "advise", advise)


def test_the_memory_of_a_file_is_moved_into_huge_pages_and_keeps_what_it_held(fd: int) -> None:
    os.pwrite(fd, b"held", 3 * _MIB)
    pages = map_for_huge_pages(fd, 5 * _MIB)
    if pages is None:
        pytest.skip("this kernel has no huge pages")
    pages.take(0, 5 * _MIB)
    huge = huge_bytes(pages.address)
    refused = pages.finish()
    if refused == errno.EINVAL:
        pytest.skip("this kernel does not collapse shared memory")
    assert huge == 4 * _MIB  # the last MiB is no whole page
    assert os.pread(fd, 4, 3 * _MIB) == b"held"


def test_rows_are_used_while_their_pages_are_moved() -> None:
    """Written before, during and after: every byte is there."""
    with Pool.create(_GEOMETRY, huge_pages=True) as pool:
        pool.rows_array[:, :64] = 7
        stop, wrong = threading.Event(), []

        def use() -> None:
            turn = 0
            while not stop.is_set():
                turn = (turn + 1) % 251
                pool.rows_array[:, 64:] = turn
                if not (pool.rows_array[:, 64:] == turn).all():
                    wrong.append(turn)

        user = threading.Thread(target=use)
        user.start()
        done = pool.prefault().wait(60)
        stop.set()
        user.join()
        assert done
        assert not wrong
        assert (pool.rows_array[:, :64] == 7).all()


def test_a_pass_for_which_there_is_no_thread_leaves_no_addresses_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    during = []

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:kvtier")

    def start(_thread: threading.Thread) -> None:
        during.append(mappings())
        raise RuntimeError("can't start new thread")

    with Pool.create(_GEOMETRY, huge_pages=True) as pool:
        before = mappings()
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.prefault()
        after = mappings()
    if during == [before]:
        pytest.skip("this kernel has no huge pages")
    assert after == before


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EAGAIN, errno.ENOMEM])
def test_a_kernel_that_refuses_is_one_warning_and_the_pool_works(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, code)
    with Pool.create(_GEOMETRY, huge_pages=True) as pool:
        assert pool.prefault().wait(30)
        pool.rows_array[:] = 3
        assert bytes(pool.row(8)) == b"\x03" * _MIB
    [record] = caplog.records
    assert record.getMessage().startswith("8.0 MiB of the pool are in small pages")


def test_what_is_in_use_is_tried_again_at_the_end(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = map_for_huge_pages(fd, 5 * _MIB)
    if pages is None:
        pytest.skip("this kernel has no huge pages")
    refuse(monkeypatch, errno.EAGAIN)
    pages.take(0, 5 * _MIB)
    monkeypatch.setattr(prefault, "advise", lambda *_: None)
    assert pages.finish() == 0
    assert not caplog.text


def test_a_kernel_without_huge_pages_is_a_warning(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefault, "_SIZE", tmp_path / "none")
    assert map_for_huge_pages(fd, 5 * _MIB) is None
    assert "pool.huge_pages = false" in caplog.text


def test_addresses_that_the_process_may_not_have_are_a_warning(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(prefault, "_map", refused)
    assert map_for_huge_pages(fd, 5 * _MIB) is None
    assert os.strerror(errno.ENOMEM) in caplog.text


def test_a_mapping_that_fails_leaves_no_addresses_behind(fd: int) -> None:
    before = Path("/proc/self/maps").read_text().count("\n")
    for _ in range(5):
        with pytest.raises(OSError, match="Bad file descriptor"):
            HugePages(10**6, 5 * _MIB, _SIZE)
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 2


def test_a_file_smaller_than_a_huge_page_asks_for_none(fd: int, caplog: pytest.LogCaptureFixture) -> None:
    assert map_for_huge_pages(fd, _MIB) is None
    assert not caplog.text


def test_a_refusal_says_what_the_kernel_is_set_to(tmp_path: Path) -> None:
    setting = tmp_path / "shmem_enabled"
    assert "which says nothing" in describe_refusal(errno.EINVAL, setting)
    setting.write_text("always [never]\n")
    assert f"'advise' written to {setting}, which says always [never]" in describe_refusal(
        errno.EINVAL, setting
    )
    assert describe_refusal(errno.ENOMEM) == os.strerror(errno.ENOMEM)
