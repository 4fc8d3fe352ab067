"""The fsspec tier on local files and in memory: the conformance tests, and what can go wrong without a server."""

import errno
import hashlib
import itertools
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from kvtier_core.errors import TierOpenError
from kvtier_core.keys import make_offload_key
from kvtier_fsspec import FsspecTier, connection, layout
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.tiers import TierTests, assert_contents
from tests.tiers.engine import TierEngine
from tests.tiers.fsspec_rules import A, B, C, FsspecTests, load, make_tier, store_until_it_works
from tests.tiers.held import num_held

HERE = Path(__file__).parent
MAKER = RowMaker("ns", 5000)
SECRET = "hunter2-of-the-test"


class TestFile(FsspecTests):
    @pytest.fixture
    def tier_settings(self, tmp_path):
        return {"url": f"file://{tmp_path}/root"}


class TestMemory(FsspecTests):
    @pytest.fixture
    def tier_settings(self):
        return {"url": f"memory://{secrets.token_hex(8)}"}


class TestFileWithLargeRows(TierTests):
    payload_bytes = 737_280

    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return FsspecTier

    @pytest.fixture
    def tier_settings(self, tmp_path):
        return {"url": f"file://{tmp_path}/root"}


def rows(*keys):
    return {key: MAKER.make(key) for key in keys}


def drive(url: str, **settings: object) -> TierDriver:
    return TierDriver(
        FsspecTier,
        FsspecTier.Settings.model_validate({"type": "fsspec", "url": url, **settings}),
        row_bytes=MAKER.row_bytes,
        namespace="ns",
        name="far",
    )


def run_program(task: str, url: str, options: dict[str, object] | None = None) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "fsspec_program.py", task, url, json.dumps(options or {})],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def register():
    """Makes a file system class known under the protocol it names."""

    def register(cls):
        fsspec.register_implementation(cls.protocol, cls, clobber=True)
        return cls

    return register


class LocalFiles(LocalFileSystem):
    """Local files under a protocol of their own, to be broken."""

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix(f"{cls.protocol}://"))


def files_below(path: Path) -> list[str]:
    return sorted(file.name for file in path.rglob("*") if file.is_file() and file.name != "namespace.json")


# Settings.


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/var/kv", "needs a protocol"),
        ("s3://", "names no bucket"),
        ("gs:///", "names no bucket"),
        ("s3:///prefix/x", "names no bucket"),
        ("simplecache::s3://bucket/x", "one plain URL"),
        ("https://host/x", "nothing can be stored over https"),
    ],
)
def test_k9_o4_a_url_that_cannot_be_meant_is_refused_before_any_io(url, message):
    with pytest.raises(ValueError, match=message):
        FsspecTier.Settings.model_validate({"type": "fsspec", "url": url})


def test_k9_o4_a_url_is_required():
    with pytest.raises(ValueError, match="url"):
        FsspecTier.Settings.model_validate({"type": "fsspec"})


def test_c53_settings_show_no_secret():
    settings = FsspecTier.Settings.model_validate(
        {"type": "fsspec", "url": f"sftp://me:{SECRET}@host/x", "storage_options": {"anything": SECRET}}
    )
    assert SECRET not in repr(settings) + str(settings)


# Opening.


def test_k9_o4_a_protocol_nobody_speaks_is_refused():
    with pytest.raises(TierOpenError, match=r"'far' \(kvtier-fsspec\).*nonsense.*; correct url"):
        drive("nonsense://x/y")


def test_k9_o4_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "paramiko", None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.sftp", raising=False)
    with pytest.raises(TierOpenError, match="pip install paramiko$"):
        drive("sftp://host/x")


def test_c33_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierOpenError, match=r"Not a directory.*; set url to a directory on a writable"):
        drive(f"file://{tmp_path}/file")


def test_c33_a_read_only_root_is_refused(tmp_path, register):
    @register
    class ReadOnly(LocalFiles):
        protocol = "readonly"

        def makedirs(self, path, **kwargs):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    with pytest.raises(TierOpenError, match="Read-only file system.*; check url"):
        drive(f"readonly://{tmp_path}")


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_s9_a_start_over_a_large_storage_ends_and_serves_all_of_it(tmp_path, protocol, monkeypatch, warnings):
    url = f"{protocol}://{tmp_path}"
    keys = [make_offload_key(hashlib.sha256(bytes([number])).digest(), 0) for number in range(200)]
    with drive(url, threads=1) as tier:
        assert tier.store(rows(*keys)).error is None
    with drive(url) as tier:
        assert num_held(tier) == 200
    assert not warnings()
    clock = itertools.count()
    monkeypatch.setattr(layout, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with drive(url) as tier:
        assert 20 <= num_held(tier) <= 40, "a second an object, 30 in all"
        assert tier.lookup(keys) == [True] * 200
        assert tier.load(keys).rows == rows(*keys)
    (told,) = warnings()
    assert "don't count within capacity" in told


class Frozen(LocalFiles):
    """Local files of which one kind may be read and not changed, once ``frozen`` says so."""

    protocol = "frozen"
    frozen = False
    changes = 0

    def _refuse(self, path):
        if self.frozen:
            type(self).changes += 1
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    def makedirs(self, path, **kwargs):
        self._refuse(path)
        super().makedirs(path, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        self._refuse(path)
        super().pipe_file(path, value, **kwargs)

    def rm_file(self, path):
        self._refuse(path)
        super().rm_file(path)


def test_b10_storage_that_can_only_be_read_is_read_and_given_nothing(
    tmp_path, register, warnings, monkeypatch
):
    register(Frozen)
    url = f"frozen://{tmp_path}"
    keys = similar_keys(6)
    with TierEngine(FsspecTier, url=url) as engine:
        engine.store("w", keys[:3])
    stored = len(list(tmp_path.rglob("*.kv")))
    next(tmp_path.rglob("*.kv")).with_suffix(".tmp").write_bytes(b"")
    monkeypatch.setattr(Frozen, "frozen", True)
    monkeypatch.setattr(Frozen, "changes", 0)
    with TierEngine(FsspecTier, url=url, capacity="8KiB") as engine:
        assert engine.load("r", keys[:3]) == stored == 3
        for number in range(5):
            engine.store(f"s{number}", keys[3:])
        assert engine.load("t", keys) == 6
        counters = engine.manager.counters.tiers["far"]
        assert (counters.store_failed, counters.stored, counters.declined) == (0, 0, 3)
    assert Frozen.changes <= 2, "the one look at the start"
    (told,) = [text for text in warnings() if "read" in text.lower()]
    assert "nothing is stored" in told.replace("\n", " ")
    assert len(list(tmp_path.rglob("*.kv"))) == 3


def test_c32_a_file_system_that_may_show_half_an_object_is_refused_unless_told_otherwise(register):
    @register
    class Unknown(MemoryFileSystem):
        protocol = "unknownfs"
        mv = AbstractFileSystem.mv

    url = f"unknownfs://{secrets.token_hex(8)}"
    with pytest.raises(TierOpenError, match='not known whether unknownfs:// shows half.*publish = "put"'):
        drive(url)
    with drive(url, publish="put") as tier:
        tier.store(rows(A))
        assert_contents(tier, rows(A), absent=[B])


def test_c53_no_secret_in_messages_logs_and_tracebacks(register, caplog):
    @register
    class Talkative(MemoryFileSystem):
        protocol = "talkative"

        def __init__(self, **options):
            super().__init__()
            self.options = options

        def pipe_file(self, path, value, mode="overwrite", **kwargs):
            raise ValueError(f"could not sign in to talkative://me:{SECRET}@host with {self.options}")

    caplog.set_level(logging.DEBUG)
    listed = secrets.token_hex(8)
    options = {"a": {"b": [listed]}}
    with pytest.raises(TierOpenError) as caught:
        drive(f"talkative://me:{SECRET}@host/x", publish="put", storage_options=options)
    text = "".join(traceback.format_exception(caught.value))
    assert "could not sign in" in text
    for secret in (SECRET, listed):
        assert secret not in text
        assert secret not in caplog.text


# Writing.


class HalfWriter(LocalFileOpener):
    """A file whose second write fails. What the first wrote is there when the file is closed."""

    def write(self, data):
        super().write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def breaking(register):
    @register
    class Breaking(LocalFiles):
        protocol = "breaking"
        broken = False
        stuck = False

        def _open(self, path, mode="rb", **kwargs):
            return (HalfWriter if self.broken and "w" in mode else LocalFileOpener)(path, mode, fs=self)

        def rm_file(self, path):
            if self.stuck:
                raise OSError(errno.EIO, "stuck")
            super().rm_file(path)

    return Breaking


def test_k2_o3_k5_o2_a_write_that_fails_half_way_publishes_nothing_and_leaves_nothing(tmp_path, breaking):
    with drive(f"breaking://{tmp_path}") as tier:
        breaking.broken = True
        result = tier.store(rows(A, B))
        assert set(result.failed) == {A, B}
        assert "No space left on device" in str(result.error)
        assert files_below(tmp_path) == []
        assert tier.lookup([A, B]) == [False, False]
        assert num_held(tier) == 0
        breaking.broken = False
        assert tier.store(rows(A, B)).error is None
        assert_contents(tier, rows(A, B))


def test_k2_o3_a_leftover_that_could_not_be_removed_is_no_block(tmp_path, breaking):
    with drive(f"breaking://{tmp_path}") as tier:
        breaking.broken = breaking.stuck = True
        assert tier.store(rows(A)).failed == (A,)
        (leftover,) = files_below(tmp_path)
        assert leftover.endswith(".tmp")
        breaking.broken = breaking.stuck = False
    with drive(f"breaking://{tmp_path}") as tier:
        assert num_held(tier) == 0
        assert_contents(tier, {}, absent=[A])
        assert files_below(tmp_path) == [leftover]  # its writer may live
        assert tier.store(rows(A)).error is None
    (path,) = tmp_path.rglob("*.tmp")
    os.utime(path, (1, 1))
    with drive(f"breaking://{tmp_path}") as tier:
        assert_contents(tier, rows(A))
        assert not path.exists()


def test_k2_o2_a_block_half_written_is_a_miss_for_everybody(tmp_path, register):
    half_way, go_on = threading.Event(), threading.Event()

    class PausedWriter(LocalFileOpener):
        def write(self, data):
            if len(data) != MAKER.row_bytes:
                return super().write(data)
            super().write(data[:4000])
            self.flush()
            half_way.set()
            assert go_on.wait(PATIENCE_S)
            return super().write(data[4000:])

    @register
    class Pausing(LocalFiles):
        protocol = "pausing"

        def _open(self, path, mode="rb", **kwargs):
            return (PausedWriter if "w" in mode else LocalFileOpener)(path, mode, fs=self)

    with drive(f"pausing://{tmp_path}") as writer:
        store = writer.start_store(rows(A))
        assert half_way.wait(PATIENCE_S)
        with drive(f"file://{tmp_path}") as reader:
            assert_contents(reader, {}, absent=[A])
            assert len(files_below(tmp_path)) == 1
            go_on.set()
            assert writer.wait(store).error is None
            assert_contents(reader, rows(A))
    assert files_below(tmp_path) == [f"{A.hex()}.kv"]


def test_c33_folders_removed_by_others_are_made_again(tmp_path):
    with drive(f"file://{tmp_path}") as tier:
        tier.store(rows(A))
        (tmp_path / "ns").rename(tmp_path / "gone")
        assert tier.load([A]).result.missing == (A,)
        tier.store(rows(B))
        assert tier.store(rows(B, C)).error is None
        assert_contents(tier, rows(B, C), absent=[A])


# Faults, and what follows.


@pytest.fixture
def expiring(register):
    @register
    class Expiring(MemoryFileSystem):
        protocol = "expiring"
        cachable = True
        credentials = "old"
        valid = "old"
        made = 0

        def __init__(self, **options):
            super().__init__()
            type(self).made += 1
            self.captured = type(self).credentials

        def _check(self):
            if self.captured != type(self).valid:
                raise PermissionError(f"the provided token {SECRET} has expired")

        def cat_file(self, *args, **kwargs):
            self._check()
            return super().cat_file(*args, **kwargs)

        def info(self, *args, **kwargs):
            self._check()
            return super().info(*args, **kwargs)

        def pipe_file(self, *args, **kwargs):
            self._check()
            return super().pipe_file(*args, **kwargs)

    return Expiring


def test_k5_o3_refreshed_credentials_are_seen_without_a_restart(expiring, caplog):
    url = f"expiring://{secrets.token_hex(8)}"
    with drive(url, publish="put", storage_options={"token": SECRET}) as tier:
        assert tier.store(rows(A)).error is None
        expiring.valid = "new"
        failed = tier.store(rows(B))
        assert failed.failed == (B,)
        assert "PermissionError: the provided token ****" in str(failed.error)
        assert tier.wait(tier.start_lookup([A])).failed == (A,)
        assert tier.load([A]).result.failed == (A,)
        expiring.credentials = "new"
        store_until_it_works(tier, rows(A, B))
        assert_contents(tier, rows(A, B), absent=[C])
    assert SECRET not in caplog.text


def test_k5_o3_a_fault_ends_the_use_of_one_file_system_once(expiring, monkeypatch):
    monkeypatch.setattr(connection, "_FRESH_S", 0.0)
    tier = make_tier({"url": f"expiring://{secrets.token_hex(8)}", "publish": "put"})
    tier.open()
    assert expiring.made == 1
    expiring.valid = "new"
    expiring.credentials = "new"
    assert "has expired" in str(tier.contains([A]))
    assert tier.contains([A, B]) == [False, False]
    assert expiring.made == 2


def test_k5_o3_faults_in_a_row_share_a_file_system(expiring, monkeypatch):
    monkeypatch.setattr(connection, "_FRESH_S", 3600.0)
    tier = make_tier({"url": f"expiring://{secrets.token_hex(8)}", "publish": "put"})
    tier.open()
    expiring.valid = "new"
    for _ in range(5):
        assert "has expired" in str(tier.contains([A]))
    assert expiring.made == 1


def test_k5_o4_absence_is_told_from_faults_key_by_key(expiring):
    tier = make_tier({"url": f"expiring://{secrets.token_hex(8)}", "publish": "put"})
    tier.open()
    tier.store(A, memoryview(bytes(8192)))
    assert load(tier, A) == bytes(8192)
    assert load(tier, B) is None
    tier.delete([A, B])
    tier.delete([A, B])
    assert tier.contains([A, B]) == [False, False]


# Several processes.


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_k13_o2_a_forked_child_uses_the_tier(tmp_path, protocol):
    run_program("fork", f"{protocol}://{tmp_path}")


def test_k13_o3_eight_processes_store_the_same_keys_without_locks(tmp_path):
    run_program("share", f"file://{tmp_path}")
    assert not [name for name in files_below(tmp_path) if not name.endswith(".kv")]


def test_k7_o3_c32_whoever_is_killed_leaves_complete_blocks_alone(tmp_path):
    run_program("kill", f"file://{tmp_path}")
    leftovers = list(tmp_path.rglob("*.tmp"))
    assert leftovers, "no kill hit a writer at work"
    for leftover in leftovers:
        os.utime(leftover, (1, 1))
    tier = make_tier({"url": f"file://{tmp_path}"}, namespace="shared", row_bytes=MAKER.row_bytes)
    tier.open()
    list(tier.scan())
    assert not list(tmp_path.rglob("*.tmp"))
