"""Several processes and instances on one root: what each sees of the others, and recycling under a reader."""

import json
import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvtier_core.errors import TierOpenError
from kvtier_core.keys import OffloadKey, RequestIdentity, hash_blocks, make_offload_key
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_disk import DiskTier
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.rows import RowMaker, similar_keys
from tests.tiers.extents import (
    HERE,
    KEYS,
    MIB,
    A,
    B,
    C,
    direct,
    drive,
    extent_files,
    index_file,
    load,
    outcome_of,
    program,
    rows,
    settings,
    store,
    wait_until,
)

RECYCLES = 100_000


def test_k7_o2_k13_what_others_store_is_found_within_the_refresh_time(tmp_path):
    with drive(tmp_path) as one, drive(tmp_path) as other:
        assert other.lookup([A]) == [False]
        assert one.store(rows(A)).error is None
        wait_until(lambda: other.lookup([A]) == [True], "the other sees the block")
        assert other.load([A]).rows == rows(A)
        one.discard([A])
        wait_until(lambda: other.lookup([A]) == [False], "the other sees it gone")
        assert other.load([A]).result.missing == (A,)


def test_what_another_process_stores_is_found_and_what_it_evicts_is_missed(tmp_path):
    text = (
        "import pathlib, sys, json\n"
        "with t.drive(pathlib.Path(sys.argv[1]), capacity=4 * t.MIB) as tier:\n"
        "    assert tier.store(t.rows(*t.KEYS[:4])).error is None\n"
        "    print('stored', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    for begin in range(10, 210, 5):\n"
        "        assert tier.store(t.rows(*t.KEYS[begin : begin + 5])).error is None\n"
        "print(json.dumps({}))\n"
    )
    with drive(tmp_path, capacity=4 * MIB) as tier:
        other = program(text, tmp_path)
        assert other.stdout.readline() == "stored\n"
        wait_until(lambda: tier.lookup(KEYS[:4]) == [True] * 4, "the blocks of the other process are seen")
        assert tier.load(KEYS[:4]).rows == rows(*KEYS[:4])
        outcome_of(other)
        wait_until(lambda: tier.lookup(KEYS[:4]) == [False] * 4, "their eviction is seen")
        assert tier.load(KEYS[200:210]).rows == rows(*KEYS[200:210])


def test_c33_a_store_finds_room_although_others_have_just_evicted_what_it_would(tmp_path, monkeypatch):
    one, other = direct(tmp_path, capacity=4 * MIB), direct(tmp_path, capacity=4 * MIB)
    fresh = iter(similar_keys(2000))
    assert store(one, *islice(fresh, 50)) == [True] * 50
    other.follow()
    catch_up = one._kept._news.catch_up

    def catch_up_before_others_store():
        catch_up()
        assert [store(other, key) for key in islice(fresh, 8)] == [[True]] * 8

    monkeypatch.setattr(one._kept._news, "catch_up", catch_up_before_others_store)
    assert [store(one, key) for key in islice(fresh, 20)] == [[True]] * 20
    one.close()
    other.close()


def test_an_eviction_that_was_not_heard_of_is_a_miss_and_no_fault(tmp_path):
    writer = direct(tmp_path, capacity=4 * MIB)
    store(writer, *KEYS[:10])
    reader = direct(tmp_path, capacity=4 * MIB)
    for begin in range(10, 210, 5):
        assert store(writer, *KEYS[begin : begin + 5]) == [True] * 5
    assert reader.contains(KEYS[:10]) == [True] * 10  # as far as it knows
    assert load(reader, *KEYS[:10]) == {}
    assert reader.contains(KEYS[:10]) == [False] * 10
    reader.close()
    writer.close()


def test_a_block_that_two_processes_store_at_once_takes_one_slot_in_the_end(tmp_path):
    one, other = direct(tmp_path), direct(tmp_path)
    assert store(one, A, B) == [True, True]
    assert store(other, A, B, C) == [True] * 3
    for _ in range(2):
        one.follow()
        other.follow()
    assert load(one, A, B, C) == load(other, A, B, C) == rows(A, B, C)
    one.close()
    other.close()
    last = direct(tmp_path)
    used = last._store.opened.index.pairs_of(last._store.opened.namespace)
    assert sorted(key for key, _ in used) == sorted([A, B, C])
    last.close()


def test_c10_a_block_that_moves_to_another_process_s_slot_while_it_is_read_is_no_miss(tmp_path, monkeypatch):
    tier, other = direct(tmp_path), direct(tmp_path)
    assert store(other, A) == [True]
    assert store(tier, A) == [True]
    files = tier._store.opened.files
    read = files.read

    def settle_before_reading(*arguments):
        monkeypatch.undo()
        tier.follow()  # keeps the other's, frees its own
        other.follow()
        assert store(other, B) == [True]
        return read(*arguments)

    monkeypatch.setattr(files, "read", settle_before_reading)
    assert load(tier, A) == rows(A)
    for each in (tier, other):
        each.close()


@pytest.mark.parametrize("deletes", [False, True])
def test_c33_of_blocks_that_several_processes_store_again_and_again_one_stays(tmp_path, deletes):
    random = Random(7)
    tiers = [direct(tmp_path) for _ in range(3)]
    keys = KEYS[:6]
    for _ in range(60):
        stored: set[OffloadKey] = set()
        for _ in range(random.randrange(2, 12)):
            tier, some = random.choice(tiers), random.sample(keys, 2)
            match random.randrange(3 if deletes else 2):
                case 0:
                    tier.follow()
                case 1:
                    assert store(tier, *some) == [True, True]
                    stored.update(some)
                case _:
                    tier.delete(some)
        for tier in [*tiers, *tiers]:
            tier.follow()
        index = tiers[0]._store.opened.index
        held = [key for key, _ in index.pairs_of(tiers[0]._store.opened.namespace)]
        assert len(held) == len(set(held))
        assert deletes or stored <= set(held)
        assert [load(tier, *keys) for tier in tiers] == [rows(*(key for key in keys if key in held))] * 3
    for tier in tiers:
        tier.close()


def test_more_changes_than_are_kept_are_learned_from_the_whole(tmp_path):
    reader, writer = direct(tmp_path, capacity=4 * MIB), direct(tmp_path, capacity=4 * MIB)
    store(writer, A)
    reader.follow()
    assert reader.contains([A]) == [True]
    for _ in range(8):
        for begin in range(1, 200, 5):
            store(writer, *KEYS[begin : begin + 5])
    reader.follow()
    assert reader.contains(KEYS[:200]) == writer.contains(KEYS[:200])
    reader.close()
    writer.close()


def test_claims_of_a_dead_process_are_free_again_and_nothing_waits_for_it(tmp_path):
    text = (
        "import os, pathlib, signal, sys\n"
        "tier = t.direct(pathlib.Path(sys.argv[1]), capacity=4 * t.MIB)\n"
        "opened = tier._store.opened\n"
        "t.store(tier, t.A)\n"
        "while len(opened.index.claim(opened.namespace, opened.owner, 1000)) > 0:\n"
        "    pass\n"
        "opened.index.begin_extent(opened.namespace, opened.owner, 8, 1 << 20)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dead = program(text, tmp_path)
    dead.communicate(timeout=PATIENCE_S)
    tier = direct(tmp_path, capacity=4 * MIB)
    index = tier._store.opened.index
    assert [row.is_ready for row in index.extents()] == [True]
    assert len(index.owners()) == 1
    assert len(list((tmp_path / ".kvtier" / "alive").iterdir())) == 1
    assert load(tier, A) == rows(A)
    assert store(tier, *KEYS[1:6]) == [True] * 5
    assert len(extent_files(tmp_path)) == 1
    tier.close()


def test_k13_o3_where_locks_always_succeed_a_live_owner_may_lose_its_slots_but_no_bytes_are_mixed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "kvtier_disk.extents.signs.is_alive", lambda *sign: False
    )  # what such locks make of it
    one = direct(tmp_path)
    opened = one._store.opened
    places = one._upkeep.make_room(2).places
    other = direct(tmp_path)  # believes the first to be dead, and frees what it had claimed
    assert store(other, A, B) == [True, True]
    assert opened.index.publish(opened.namespace, opened.owner, [(C, places[0])], [], 1.0) == [False]
    assert load(other, A, B, C) == rows(A, B)
    other.close()
    one.close()


def test_c10_what_is_stored_after_others_had_removed_it_is_there(tmp_path, monkeypatch):
    with drive(tmp_path, refresh="1h") as tier:
        other = direct(tmp_path)
        opened = tier.backend.port._instance()._tier
        write = opened._store._write_rows

        def write_while_others_store_and_remove_it(*arguments):
            assert store(other, A) == [True]
            opened._upkeep._news.catch_up()
            other.delete([A])
            opened._upkeep._news.catch_up()
            return write(*arguments)

        monkeypatch.setattr(opened._store, "_write_rows", write_while_others_store_and_remove_it)
        assert tier.store(rows(A)).error is None
        assert tier.load([A]).rows == rows(A)
        other.close()


def test_k13_o2_a_fork_gets_a_clear_error_and_harms_nobody(tmp_path):
    tier = direct(tmp_path)
    store(tier, A)
    child = os.fork()
    if child == 0:
        (outcome,) = store(tier, B)
        os._exit(0 if "open the tier anew after a fork" in str(outcome) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store(tier, C) == [True]
    assert load(tier, A, B, C) == rows(A, C)
    tier.close()


# Namespaces.


def namespace(**changes: Any) -> Namespace:
    values: dict[str, Any] = {
        "model": "org/model",
        "kv_dtype": "float16",
        "tokens_per_block": 16,
        "groups": (GroupSpec(layers=("0",), block_bytes=64_000),),
        "layout": "test",
        "weights_digest": "w",
        **changes,
    }
    return Namespace(**values)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_dtype": "bfloat16"},
        {"revision": "b"},
        {"weights_digest": "other"},
        {"parallel": (("tp", 2), ("rank", 1))},
        {"tokens_per_block": 32},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_k1_o1_k1_o2_k13_o1_bytes_that_are_not_interchangeable_never_meet(tmp_path, changes):
    one, other = namespace().name, namespace(**changes).name
    with drive(tmp_path, namespace=one) as tier, drive(tmp_path, namespace=other) as other_tier:
        assert tier.store(rows(A, B, namespace=one)).error is None
        wait_until(lambda: tier.lookup([A, B]) == [True, True], "they are there")
        assert other_tier.lookup([A, B]) == [False, False]
        assert other_tier.store(rows(A, namespace=other)).error is None
        assert other_tier.load([A, B]).rows == rows(A, namespace=other)
        assert tier.load([A, B]).rows == rows(A, B, namespace=one)
    assert (tmp_path / one).is_dir()
    assert (tmp_path / other).is_dir()
    with drive(tmp_path, namespace=namespace(kv_dtype="float16").name) as tier:
        assert tier.load([A, B]).rows == rows(A, B, namespace=one)


def test_k1_o4_one_tenants_blocks_serve_no_other(tmp_path):
    names = [("A", None), ("B", None), (None, None), (None, "1"), (None, "2")]
    identities = [RequestIdentity(salt=salt, lora=lora) for salt, lora in names]
    keys = [make_offload_key(hash_blocks(range(16), 16, identity)[0], 0) for identity in identities]
    assert len(set(keys)) == 5
    with drive(tmp_path) as tier:
        assert tier.store(rows(keys[0])).error is None
        assert tier.lookup(keys) == [True, False, False, False, False]


# Recycling.

READER = """
import collections, json, pathlib, sys
seen = collections.Counter()
with t.drive(pathlib.Path(sys.argv[1]), capacity=4 * t.MIB) as tier:
    print("reading", flush=True)
    import threading
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), done.set()), daemon=True).start()
    begin = 0
    while not done.is_set():
        keys = t.KEYS[begin % 396 : begin % 396 + 4]
        begin += 3
        loaded = tier.load(keys)
        seen["failed"] += len(loaded.result.failed)
        for key, row in loaded.rows.items():
            proven = t.MAKER.proves(key, row)
            exact = row[:64000] == bytes([t.KEYS.index(key) % 256]) * 64000
            seen["right" if exact and proven else "wrong" if proven else "refused"] += 1
print(json.dumps(seen))
"""


@pytest.mark.timeout(600)
def test_c03_a_hundred_thousand_recycles_under_a_reader_in_another_process_give_no_wrong_bytes(tmp_path):
    tier = direct(tmp_path, capacity=4 * MIB)
    reader = program(READER, tmp_path)
    assert reader.stdout.readline() == "reading\n"
    recycled = 0
    buffers = {}
    maker = RowMaker("ns", 64_000)
    for number, key in enumerate(KEYS):
        row = bytearray(bytes([number % 256]) * maker.row_bytes)
        with memoryview(row) as view:
            maker._sealer.seal(key, view, maker.payload_bytes)
        buffers[key] = bytes(row)
    while recycled < RECYCLES:
        for begin in range(0, len(KEYS), 40):
            keys = KEYS[begin : begin + 40]
            missing = [key for key, there in zip(keys, tier.contains(keys), strict=True) if not there]
            outcomes = tier.store_many(missing, [memoryview(buffers[key]) for key in missing])
            assert all(outcome is True for outcome in outcomes)
            recycled += len(missing)
        tier.follow()
    seen = outcome_of(reader)
    tier.close()
    assert seen.get("wrong", 0) == 0
    assert seen.get("failed", 0) == 0
    assert seen["right"] > 0


# Read-only.


def test_c33_a_tier_that_is_configured_read_only_loads_what_others_store_and_stores_nothing(tmp_path):
    with pytest.raises(TierOpenError, match="configured read_only"):
        drive(tmp_path / "nothing", read_only=True)
    with drive(tmp_path) as writer:
        writer.store(rows(A))
        with drive(tmp_path, read_only=True) as reader:
            assert reader.load([A]).rows == rows(A)
            writer.store(rows(B))
            wait_until(lambda: reader.lookup([B]) == [True], "the reader sees the block")
            assert reader.load([A, B]).rows == rows(A, B)
            result = reader.store(rows(C))
            assert result.error is None
            assert reader.lookup([C]) == [False]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    with drive(tmp_path, read_only=True) as reader:
        assert reader.load([A, B]).rows == rows(A, B)
        reader.discard([A])
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before


_OWN_MOUNTS = ["unshare", "--mount", "--map-root-user"]

READ_ONLY = """
import pathlib, subprocess, sys
root = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64M,mode=755", "none", root], check=True)
with t.drive(root, capacity=16 * t.MIB) as tier:
    assert tier.store(t.rows(*t.KEYS[:8])).error is None
    if sys.argv[2] == "crash":
        with tier.backend.port._instance()._tier._store.opened.index.database.transaction():
            subprocess.run(["cp", "-a", root, f"{root}.copy"], check=True)
if sys.argv[2] == "crash":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64M,mode=755", "none", root], check=True)
    subprocess.run(["cp", "-a", f"{root}.copy/.", root], check=True)
    subprocess.run(["rm", "-rf", f"{root}.copy"], check=True)
subprocess.run(["mount", "-o", "remount,ro", root], check=True)
with t.drive(root, capacity=16 * t.MIB) as tier:
    assert tier.load(t.KEYS[:9]).rows == t.rows(*t.KEYS[:8])
    for _ in range(3):
        result = tier.store(t.rows(t.KEYS[9]))
        assert (result.error, result.missing) == (None, (t.KEYS[9],)), result
    subprocess.run(["mount", "-o", "remount,rw", root], check=True)
    t.wait_until(lambda: not tier.store(t.rows(t.KEYS[9])).missing, "stores work again")
    assert tier.load(t.KEYS[:10]).rows == t.rows(*t.KEYS[:8], t.KEYS[9])
print("{}")
"""


@pytest.mark.parametrize("end", ["clean", "crash"])
def test_b10_c33_a_root_that_is_mounted_read_only_serves_what_it_holds_and_stores_again_afterwards(
    tmp_path, end
):
    root = tmp_path / "root"
    root.mkdir()
    try:
        subprocess.run([*_OWN_MOUNTS, "mount", "-t", "tmpfs", "none", root], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    done = subprocess.run(
        [
            *_OWN_MOUNTS,
            sys.executable,
            "-W",
            "error",
            "-c",
            f"import tests.tiers.extents as t\n{READ_ONLY}",
            root,
            end,
        ],
        cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# Privacy.


def test_a_root_that_everybody_may_write_to_is_refused_unless_allowed(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(TierOpenError, match=r"everybody may write to it.*allow_writable_by_others"):
        drive(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with drive(tmp_path, allow_writable_by_others=True) as tier:
        assert tier.store(rows(A)).error is None


@pytest.mark.parametrize("name", ["..", ".", "../elsewhere", "a/b", "/etc", "", ".kvtier", "x\0y", "x" * 300])
def test_no_namespace_leads_out_of_the_root(tmp_path, name):
    with pytest.raises(TierOpenError, match="can't be the name of a directory"):
        drive(tmp_path / "root", namespace=name)
    assert [path.name for path in tmp_path.rglob("*")] in ([], ["root"])


def test_a_namespace_that_is_a_link_is_not_followed_by_repairs(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0000000001.ext").write_bytes(b"precious")
    with drive(tmp_path / "root") as tier:
        tier.store(rows(A))
    (tmp_path / "root" / "other").symlink_to(elsewhere)
    index_file(tmp_path / "root").unlink()
    with drive(tmp_path / "root") as tier:
        assert tier.load([A]).rows == rows(A)
    assert (elsewhere / "0000000001.ext").read_bytes() == b"precious"


def test_a_key_that_is_too_long_fails_its_store_alone(tmp_path):
    tier = direct(tmp_path)
    long = OffloadKey(A + bytes(100))
    outcomes = tier.store_many([A, long], [memoryview(MAKE) for MAKE in rows(A, B).values()])
    assert outcomes[0] is True
    assert "a key must have 1 to 48 bytes" in str(outcomes[1])
    tier.close()


# Where it may be.


def test_network_file_systems_are_refused_with_what_to_do(tmp_path, monkeypatch):
    real = Path.read_text
    mounts = f"30 1 0:99 / {tmp_path} rw - nfs4 server:/export rw\n"
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: mounts if path.name == "mountinfo" else real(path, *a, **k)
    )
    with pytest.raises(
        TierOpenError, match=r'on a nfs4 file system.*set root to a local disk, or layout = "files"'
    ):
        drive(tmp_path)
    files = DiskTier.for_settings(settings(tmp_path, layout="files"))
    assert files is not DiskTier
    assert files.info.bounded_by == "core"


def test_a_restart_rewrites_no_extent(tmp_path):
    with drive(tmp_path) as tier:
        tier.store(rows(*KEYS[:10]))
    before = [(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in extent_files(tmp_path)]
    with drive(tmp_path) as tier:
        assert tier.store(rows(*KEYS[:10])).error is None
        assert tier.load(KEYS[:10]).rows == rows(*KEYS[:10])
    assert before == [(p.name, p.stat().st_ino, p.stat().st_mtime_ns) for p in extent_files(tmp_path)]


def test_c02_each_namespace_has_a_directory_with_its_description(tmp_path):
    with drive(tmp_path / "made" / "now") as tier:
        tier.store(rows(A))
    described = json.loads((tmp_path / "made" / "now" / "ns" / "namespace.json").read_text())
    assert described == {"model": "kit", "namespace": "ns"}


def test_removing_the_namespace_leaves_others_and_removing_the_last_leaves_nothing(tmp_path):
    one, other = direct(tmp_path), direct(tmp_path, namespace="other")
    store(one, A)
    store(other, A, namespace="other")
    one.remove_namespace()
    one.close()
    assert not (tmp_path / "ns").exists()
    assert load(other, A) == rows(A, namespace="other")
    other.remove_namespace()
    other.close()
    assert list(tmp_path.iterdir()) == []
    shutil.rmtree(tmp_path)
