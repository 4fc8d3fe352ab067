"""A disk that fails: each fault costs the stores or loads it hits, and nothing stays claimed or half there (C33)."""

import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtier_core.values import TierContext
from kvtier_disk import DiskTier
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.rows import RowMaker
from tests.tiers.extents import (
    HERE,
    KEYS,
    MAKER,
    MIB,
    ROW,
    A,
    B,
    C,
    direct,
    drive,
    extent_files,
    load,
    rows,
    settings,
    store,
    wait_until,
)
from tests.tiers.held import num_held

WRITES = ["pwritev", "pwrite", "posix_fallocate", "fdatasync", "fsync"]
CODES = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES]


class FailingCalls:
    """Counts calls of ``os`` functions on extents, and lets the given ones fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names, code: int = 0, at=()) -> None:
        self.count = 0
        self.lock = threading.Lock()
        for name in names:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name), code, at))

    def _wrapped(self, real, code, at):
        def call(fd, *args):
            with self.lock:
                self.count += 1
                fails = at == "all" or self.count in at
            if fails:
                raise OSError(code, os.strerror(code))
            return real(fd, *args)

        return call


def held_slots(tier: DiskTier) -> dict[str, int]:
    """How many slots hold blocks, and how many are claimed."""
    with tier._store.opened.index.database.reading() as connection:
        stored, claimed = connection.execute("SELECT count(key), count(owner) FROM slots").fetchone()
    return {"stored": stored, "claimed": claimed}


def writes_of_a_store(root: Path, monkeypatch) -> int:
    with monkeypatch.context() as patched:
        calls = FailingCalls(patched, WRITES)
        tier = direct(root, capacity=16 * MIB)
        calls.count = 0
        assert store(tier, *KEYS[:6]) == [True] * 6
        tier.close()
        return calls.count


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_c33_k5_o2_a_fault_at_any_write_fails_the_store_and_leaves_nothing(tmp_path, monkeypatch, code):
    count = writes_of_a_store(tmp_path / "counted", monkeypatch)
    assert count >= 5
    for at in range(1, count + 1):
        root = tmp_path / str(at)
        tier = direct(root, capacity=16 * MIB)
        with monkeypatch.context() as patched:
            FailingCalls(patched, WRITES, code, {at})
            outcomes = store(tier, *KEYS[:6])
        failed = [key for key, outcome in zip(KEYS, outcomes, strict=False) if outcome is not True]
        assert failed, at
        assert all(isinstance(outcome, OSError) for outcome in outcomes if outcome is not True)
        assert load(tier, *KEYS[:6]) == rows(*[key for key in KEYS[:6] if key not in failed])
        assert store(tier, *failed) == [True] * len(failed)
        assert load(tier, *KEYS[:6]) == rows(*KEYS[:6])
        assert held_slots(tier) == {"stored": 6, "claimed": 0}
        tier.close()


def test_c33_k5_o2_a_disk_that_fails_for_a_while_fails_stores_and_serves_loads(tmp_path, monkeypatch):
    with drive(tmp_path, capacity=16 * MIB) as tier:
        assert tier.store(rows(A, B)).error is None
        with monkeypatch.context() as patched:
            FailingCalls(patched, WRITES, errno.ENOSPC, "all")
            for _ in range(3):
                result = tier.store(rows(*KEYS[4:9]))
                assert set(result.failed) == {*KEYS[4:9]}
                assert "No space left on device" in str(result.error)
            assert tier.load([A, B, C]).rows == rows(A, B)
            assert tier.lookup(KEYS[4:9]) == [False] * 5
        assert tier.store(rows(*KEYS[4:9])).error is None
        assert tier.load([A, B, *KEYS[4:9]]).rows == rows(A, B, *KEYS[4:9])
        assert num_held(tier) == 7


def test_c33_a_bad_spot_costs_one_block_and_not_its_neighbours(tmp_path, monkeypatch):
    tier = direct(tmp_path, capacity=16 * MIB)
    store(tier, *KEYS[:8])
    real = os.preadv
    place = tier._contents.find([KEYS[3]])[0]
    assert place is not None
    with tier._store.opened.files._using(place >> 24) as opened:
        bad = opened.shape.row_offset(place & 0xFFFFFF) + 8192

    def preadv(fd, buffers, offset):
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    buffers = [bytearray(ROW) for _ in range(8)]
    outcomes = tier.load_many(KEYS[:8], [memoryview(buffer) for buffer in buffers])
    assert [outcome is True for outcome in outcomes] == [True] * 3 + [False] + [True] * 4
    assert isinstance(outcomes[3], OSError)
    assert [bytes(buffer) for buffer in buffers[:3]] == list(rows(*KEYS[:3]).values())
    tier.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE], ids=errno.errorcode.get)
def test_c33_k5_o4_loads_that_fail_are_faults_and_no_absence(tmp_path, monkeypatch, code):
    with drive(tmp_path, capacity=16 * MIB) as tier:
        assert tier.store(rows(A, B)).error is None
        tier.backend.port._instance()._tier._store.opened.files.close()
        with monkeypatch.context() as patched:
            real = os.open
            patched.setattr(
                os,
                "open",
                lambda path, *args, **kw: (
                    _fail(code) if str(path).endswith(".ext") else real(path, *args, **kw)
                ),
            )
            result = tier.load([A, B]).result
            assert set(result.failed) == {A, B}
            assert os.strerror(code) in str(result.error)
            assert not result.missing
        assert tier.store(rows(A, B)).error is None
        assert tier.load([A, B]).rows == rows(A, B)


def _fail(code: int):
    raise OSError(code, os.strerror(code))


def test_c33_with_few_descriptors_extents_are_closed_and_opened_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier_disk.tier._MAX_OPEN", 2)
    tier = direct(tmp_path, extent_size="1MiB")
    assert store(tier, *KEYS[:100]) == [True] * 100
    assert len(extent_files(tmp_path)) > 4
    for _ in range(3):
        assert load(tier, *KEYS[:100]) == rows(*KEYS[:100])
    assert len(tier._store.opened.files._open) <= 2
    tier.close()


def test_c33_out_of_descriptors_the_idle_ones_make_room(tmp_path, monkeypatch):
    tier = direct(tmp_path, extent_size="1MiB")
    assert store(tier, *KEYS[:60]) == [True] * 60
    tier._store.opened.files.close()
    load(tier, KEYS[0])
    real = os.open
    refused: list[object] = []

    def open_file(path, *args, **kw):
        if str(path).endswith(".ext") and tier._store.opened.files._open.get(1) and not refused:
            refused.append(path)
            _fail(errno.EMFILE)
        return real(path, *args, **kw)

    monkeypatch.setattr(os, "open", open_file)
    assert load(tier, *KEYS[:60]) == rows(*KEYS[:60])
    assert len(refused) == 1
    tier.close()


# Slow.


def test_c31_c33_a_hung_disk_holds_up_its_own_calls_and_the_shutdown_is_bounded(tmp_path, monkeypatch):
    hangs, go_on = threading.Event(), threading.Event()
    real = os.preadv

    def preadv(*args):
        hangs.set()
        assert go_on.wait(PATIENCE_S)
        return real(*args)

    with drive(tmp_path, capacity=16 * MIB, threads=2) as tier:
        assert tier.store(rows(A, B)).error is None
        monkeypatch.setattr(os, "preadv", preadv)
        buffer = bytearray(ROW)
        job = tier.start_load([A], [buffer])
        assert hangs.wait(PATIENCE_S)
        assert tier.lookup([A, B]) == [True, True]
        assert tier.store(rows(C)).error is None  # the other thread is free
        assert list(tier.drain(0.05)) == [job]
        begin = time.monotonic()
        tier.shutdown(0.1)
        assert time.monotonic() - begin < PATIENCE_S / 2
        assert tier.unanswered() == {job}
        go_on.set()
        assert tier.wait(job).error is None
        assert bytes(buffer) == MAKER.make(A)


# Without what is best.


def test_without_o_direct_the_tier_works_and_says_once_what_is_lost(tmp_path, monkeypatch, warnings):
    real = os.open

    def open_file(path, flags, *args, **kw):
        return _fail(errno.EINVAL) if flags & os.O_DIRECT else real(path, flags, *args, **kw)

    monkeypatch.setattr(os, "open", open_file)
    with drive(tmp_path, capacity=16 * MIB) as tier:
        assert tier.store(rows(*KEYS[:10])).error is None
        assert tier.load(KEYS[:10]).rows == rows(*KEYS[:10])
    (warning,) = warnings()
    assert "no O_DIRECT below" in warning
    assert "blocks pass through the page cache" in warning


def test_without_fallocate_the_tier_works_and_says_once_what_is_lost(tmp_path, monkeypatch, warnings):
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: _fail(errno.EOPNOTSUPP))
    with drive(tmp_path, capacity=16 * MIB, extent_size="1MiB") as tier:
        assert tier.store(rows(*KEYS[:40])).error is None
        assert tier.load(KEYS[:40]).rows == rows(*KEYS[:40])
    (warning,) = warnings()
    assert "can't reserve room" in warning


@pytest.mark.parametrize("row_bytes", [4096, 5000, 12_288, 100_001])
def test_small_and_odd_rows_work(tmp_path, row_bytes):
    context = TierContext(name="disk", namespace="odd", row_bytes=row_bytes)
    tier = DiskTier(settings(tmp_path), context)
    tier.open()
    tier.follow()
    maker = RowMaker("odd", row_bytes - 64)
    content = {
        key: bytes(bytearray(maker.make(key))[-row_bytes:]).ljust(row_bytes, b"x") for key in KEYS[:20]
    }
    for key, row in content.items():  # the proof has to be at the end of a row, however long
        content[key] = row[:-64] + maker.make(key)[-64:]
    views = [memoryview(row) for row in content.values()]
    assert tier.store_many(list(content), views) == [True] * 20
    buffers = [bytearray(row_bytes) for _ in content]
    assert tier.load_many(list(content), [memoryview(buffer) for buffer in buffers]) == [True] * 20
    assert [bytes(buffer) for buffer in buffers] == list(content.values())
    tier.close()


def test_c29_aligned_rows_pass_the_page_cache_by_and_others_work_too(tmp_path, monkeypatch):
    tier = direct(tmp_path, capacity=16 * MIB)
    if not tier._root.direct:
        pytest.skip("no O_DIRECT here")
    store(tier, B)
    used: set[int] = set()
    real = os.pwritev

    def pwritev(fd, buffers, offset):
        done = real(fd, buffers, offset)
        used.add(fd)
        return done

    monkeypatch.setattr(os, "pwritev", pwritev)
    with tier._store.opened.files._using(1) as opened:
        straight, buffered = opened.direct, opened.buffered
    memory = mmap.mmap(-1, 4 * ROW)
    view = memoryview(memory)
    view[:ROW] = MAKER.make(A)
    assert tier.store_many([A], [view[:ROW]]) == [True]
    assert used == {straight}
    used.clear()
    view[ROW + 1 : 2 * ROW + 1] = MAKER.make(C)
    assert tier.store_many([C], [view[ROW + 1 : 2 * ROW + 1]]) == [True]
    assert used <= {straight, buffered}
    assert load(tier, A, B, C) == rows(A, B, C)
    tier.close()


def test_c29_short_reads_and_writes_are_continued(tmp_path, monkeypatch):
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: real_write(fd, [data[0][:5000]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: real_read(fd, [memoryview(into[0])[:3333]], at))
    tier = direct(tmp_path, capacity=16 * MIB)
    assert store(tier, *KEYS[:5]) == [True] * 5
    assert load(tier, *KEYS[:5]) == rows(*KEYS[:5])
    tier.close()


def test_c33_a_root_that_vanishes_fails_stores_and_is_not_made_anew(tmp_path):
    root = tmp_path / "root"
    with drive(root, capacity=16 * MIB) as tier:
        assert tier.store(rows(A)).error is None
        root.rename(tmp_path / "away")
        root.mkdir()
        for key in KEYS[10:40]:
            tier.store(rows(key))  # into files that are open still, or not at all
            time.sleep(0.01)
        assert list(root.iterdir()) == []  # it may be the empty place of a disk that is not mounted
        root.rmdir()
        (tmp_path / "away").rename(root)
        wait_until(lambda: tier.store(rows(C)).error is None, "stores work again")
        assert tier.load([A, C]).rows == rows(A, C)


# For real.

FULL = """
import pathlib, subprocess, sys
root = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12M,mode=755", "none", root], check=True)
options = {"capacity": 64 * t.MIB, "extent_size": "1MiB"}
def fill():
    with (root / "ballast").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return
with t.drive(root, **options) as tier:
    for begin in range(0, 300, 20):
        result = tier.store(t.rows(*t.KEYS[begin : begin + 20]))
        assert not result.failed or "No space left on device" in result.error or "no room" in result.error, result
    loaded = tier.load(t.KEYS[:300])
    assert loaded.rows and not loaded.result.failed, loaded.result
    assert loaded.rows.items() <= t.rows(*t.KEYS[:300]).items()
    fill()
    tier.store(t.rows(*t.KEYS[300:320]))
    assert tier.load(list(loaded.rows)).rows.items() <= loaded.rows.items()
with t.drive(root, **options) as tier:
    found = tier.load(t.KEYS[:320])
    assert found.rows and not found.result.failed, found.result
    assert found.rows.items() <= t.rows(*t.KEYS[:320]).items()
    (root / "ballast").unlink()
    t.wait_until(lambda: tier.store(t.rows(*t.KEYS[320:330])).error is None, "stores work again")
    assert tier.load(t.KEYS[320:330]).rows == t.rows(*t.KEYS[320:330])
print("{}")
"""
_OWN_MOUNTS = ["unshare", "--mount", "--map-root-user"]


def test_c33_k5_o2_a_file_system_that_is_full_and_then_is_not(tmp_path):
    try:
        subprocess.run(
            [*_OWN_MOUNTS, "mount", "-t", "tmpfs", "none", tmp_path], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    done = subprocess.run(
        [*_OWN_MOUNTS, sys.executable, "-c", f"import tests.tiers.extents as t\n{FULL}", tmp_path],
        cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
