"""What the fsspec tier owes on every file system, beside the conformance tests."""

import json
import secrets
import time
from collections import Counter
from typing import Any

import fsspec
import pytest

from kvtier_core.keys import OffloadKey
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.values import TierContext
from kvtier_fsspec import FsspecTier
from kvtier_testing.checks import make_rows
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.fixtures import NAMESPACE
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.tiers import TierTests, assert_contents
from tests.tiers.engine import TierEngine
from tests.tiers.held import num_held

KEYS = similar_keys(8)
A, B, C, D = KEYS[:4]


def make_tier(
    settings: dict[str, Any], *, namespace: str = NAMESPACE, row_bytes: int = 8192, name: str = "kit"
) -> FsspecTier:
    """The tier without the core around it, not open."""
    return FsspecTier(
        FsspecTier.Settings.model_validate({"type": "fsspec", **settings}),
        TierContext(
            name=name, namespace=namespace, row_bytes=row_bytes, description={"namespace": namespace}
        ),
    )


class FsspecTests(TierTests):
    """Give it ``tier_settings`` with a URL nobody else uses."""

    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return FsspecTier

    @pytest.fixture
    def place(self, tier_settings):
        """An independent witness: the file system, and the path of the namespace."""
        options = tier_settings.get("storage_options", {})
        fs, root = fsspec.core.url_to_fs(tier_settings["url"], use_listings_cache=False, **options)
        return fs, f"{root}/{NAMESPACE}"

    def test_k12_o1_the_whole_key_is_in_the_name(self, open_tier, maker, place):
        fs, directory = place
        keys = [similar_keys(1, group=group)[0] for group in (0, 1)]
        open_tier().store(make_rows(maker, keys))
        for key in keys:
            assert fs.cat_file(f"{directory}/{key.hex()[:2]}/{key.hex()}.kv") == maker.make(key)
        said = json.loads(fs.cat_file(f"{directory}/namespace.json"))
        assert said.pop("in_use_until") > time.time()
        assert said == {"model": "kit", "namespace": NAMESPACE}
        assert len(fs.find(directory)) == 3

    def test_k7_o2_what_another_instance_stores_is_found_at_once(self, open_tier, maker):
        one, other = open_tier(), open_tier()
        rows = make_rows(maker, [A, B])
        assert_contents(other, {}, absent=[A, B])
        one.store(rows)
        assert_contents(other, rows)

    def test_b9_k2_an_object_of_another_size_proves_nothing_and_is_replaced(self, open_tier, maker, place):
        fs, directory = place
        rows = make_rows(maker, [A, B])
        tier = open_tier()
        for size in (1, maker.row_bytes - 1, maker.row_bytes + 1, 100_000):
            tier.store(rows)
            fs.pipe_file(block_path(directory, A), (maker.make(A) * 100)[:size])
            loaded = tier.load([A, B])
            assert loaded.result.error is None
            assert not maker.proves(A, loaded.rows[A]), "the core counts it as damaged"
            assert loaded.rows[B] == rows[B]
            tier.discard([A])
            assert tier.store(rows).error is None
            assert_contents(tier, rows)

    def test_b9_k2_a_restart_removes_objects_of_another_size_and_says_so(
        self, open_tier, maker, place, warnings
    ):
        fs, directory = place
        open_tier().store(make_rows(maker, [A, B, C, D]))
        for key, size in ((A, 0), (B, maker.row_bytes - 1), (C, maker.row_bytes + 1)):
            fs.pipe_file(block_path(directory, key), b"x" * size)
        tier = open_tier()
        assert not any(fs.exists(block_path(directory, key)) for key in (A, B, C))
        (told,) = [text for text in warnings() if "another size" in text]
        assert "3 stored blocks are damaged" in told
        assert_contents(tier, make_rows(maker, [D]), absent=[A, B, C])

    def test_c33_an_empty_object_is_no_fault_of_a_lookup(self, open_tier, maker, place):
        fs, directory = place
        tier = open_tier()
        tier.store(make_rows(maker, [A, B]))
        fs.pipe_file(block_path(directory, A), b"")
        assert tier.lookup([A, B, C]) == [True, True, False], "what it holds is found out when it is loaded"

    def test_c33_objects_deleted_by_others_are_misses(self, open_tier, maker, place):
        fs, directory = place
        rows = make_rows(maker, [A, B])
        tier = open_tier()
        tier.store(rows)
        fs.rm_file(block_path(directory, A))
        assert tier.load([A, B]).result.missing == (A,)
        tier.store(rows)
        assert_contents(tier, rows)

    def test_objects_that_are_no_blocks_are_left_alone_and_not_counted(self, open_tier, maker, place):
        fs, directory = place
        open_tier().store(make_rows(maker, [A]))
        folder = block_path(directory, A).rpartition("/")[0]
        strangers = [f"{folder}/README", f"{folder}/xyz.kv", f"{folder}/{A.hex()}.kv.bak"]
        for stranger in strangers:
            fs.pipe_file(stranger, b"not mine")
        assert num_held(open_tier()) == 1
        assert all(fs.exists(stranger) for stranger in strangers)

    def test_k13_o1_two_ranks_read_their_own(self, tier_settings, maker):
        ranks = [
            Namespace(
                model="m",
                kv_dtype="float16",
                tokens_per_block=16,
                groups=(GroupSpec(layers=("0",), block_bytes=4096),),
                layout="test",
                weights_digest="w",
                parallel=(("tp_size", 2), ("tp_rank", rank)),
            ).name
            for rank in (0, 1)
        ]
        makers = [RowMaker(rank, 5000) for rank in ranks]
        tiers = [make_tier(tier_settings, namespace=rank) for rank in ranks]
        for tier, own in zip(tiers, makers, strict=True):
            tier.open()
            tier.store(A, memoryview(own.make(A)))
        for tier, own in zip(tiers, makers, strict=True):
            assert load(tier, A) == own.make(A)

    def test_k13_o4_urls_are_apart(self, tier_settings, maker):
        one = make_tier(tier_settings)
        other = make_tier({**tier_settings, "url": f"{tier_settings['url']}-{secrets.token_hex(4)}"})
        for tier in (one, other):
            tier.open()
        one.store(A, memoryview(maker.make(A)))
        assert other.contains([A]) == [False]
        other.remove_namespace()
        assert load(one, A) == maker.make(A)

    def test_remove_namespace_leaves_nothing_of_it_and_all_of_others(self, tier_settings, maker, place):
        fs, directory = place
        mine, theirs = make_tier(tier_settings), make_tier(tier_settings, namespace="theirs")
        for tier in (mine, theirs):
            tier.open()
            tier.store(A, memoryview(maker.make(A)))
        mine.remove_namespace()
        mine.remove_namespace()
        assert fs.find(directory) == []
        assert mine.contains([A]) == [False]
        assert theirs.contains([A]) == [True]

    def test_c34_a_closed_tier_opens_again(self, tier_settings, maker):
        tier = make_tier(tier_settings)
        tier.close()
        for _ in range(2):
            tier.open()
            tier.store(A, memoryview(maker.make(A)))
            tier.close()
        later = make_tier(tier_settings)
        later.open()
        assert load(later, A) == maker.make(A)

    # What others have stored.

    @pytest.fixture
    def put_for_others(self, place, maker):
        """Put an object of a block's size in the place of a block: it shows whether the block is stored over."""
        fs, directory = place

        def put(*keys: OffloadKey) -> None:
            for key in keys:
                fs.pipe_file(block_path(directory, key), bytes(maker.row_bytes))

        return put

    def test_s11_what_another_engine_stored_is_not_stored_again(
        self, open_tier, maker, place, put_for_others
    ):
        fs, directory = place
        one, other = open_tier(), open_tier()
        one.store(make_rows(maker, [A, B]))
        put_for_others(A)
        result = other.store(make_rows(maker, [A, B]))
        assert (result.error, result.held) == (None, (A, B))
        assert other.store(make_rows(maker, [C])).held == ()
        assert fs.cat_file(block_path(directory, A)) == bytes(maker.row_bytes), "it was stored again"
        assert num_held(other) == 3, "they count within the capacity, as what it stored itself does"
        assert_contents(other, make_rows(maker, [B, C]))

    @pytest.mark.parametrize("grow", [-8192, -1, 1, 8192])
    def test_s11_an_object_of_another_size_is_stored_over(self, open_tier, maker, place, grow):
        fs, directory = place
        tier = open_tier()
        fs.makedirs(block_path(directory, A).rpartition("/")[0], exist_ok=True)
        fs.pipe_file(block_path(directory, A), bytes(maker.row_bytes + grow))
        result = tier.store(make_rows(maker, [A]))
        assert (result.error, result.held) == (None, ())
        assert_contents(tier, make_rows(maker, [A]))

    def test_s11_blocks_found_wrong_are_stored_over(self, open_tier, maker, put_for_others):
        rows = make_rows(maker, KEYS)
        one, other = open_tier(), open_tier()
        one.store(rows)
        put_for_others(*KEYS)
        for key in KEYS:
            assert not maker.proves(key, other.load([key]).rows[key])
            other.discard([key])  # three at most are deleted
        for key in KEYS:  # each as a request of its own, which asks again
            assert other.store({key: rows[key]}).held == ()
        assert_contents(other, rows)

    # All namespaces below a URL.

    @pytest.fixture
    def stored(self, place):
        """How many blocks there are, by namespace."""
        fs, directory = place
        root = directory.rpartition("/")[0]

        def stored() -> Counter[str]:
            paths = [path.removeprefix(f"{root}/") for path in fs.find(root) if path.endswith(".kv")]
            return Counter(path.partition("/")[0] for path in paths)

        return stored

    def test_b3_c13_the_capacity_holds_for_all_that_nobody_uses(self, tier_settings, stored):
        names = []
        for _ in range(3):
            with TierEngine(FsspecTier, weights=None, capacity="20KiB", **tier_settings) as engine:
                names.append(engine.namespace)
                for number in range(5):
                    engine.store(f"s{number}", KEYS[number : number + 1])
                    assert stored().total() <= 5
                assert engine.load("l", KEYS[:5]) == 5
        assert stored() == {names[-1]: 5}

    def test_b3_c34_an_epoch_of_before_a_reset_counts_within_a_minute(
        self, tier_settings, stored, monkeypatch
    ):
        monkeypatch.setattr(FsspecTier, "follow_interval", 0.05)
        with TierEngine(FsspecTier, weights=None, capacity="20KiB", **tier_settings) as engine:
            engine.store("before", KEYS[:5])
            engine.manager.reset_cache()
            engine.store("after", KEYS[:3])
            later = engine.manager.namespace.name
            give_up = time.monotonic() + PATIENCE_S
            while stored() != {engine.namespace: 2, later: 3}:  # the tier may open for the new epoch only now
                assert time.monotonic() < give_up, stored()
                engine.manager.end_step()
                engine.manager.wait(0.05)
            assert engine.load("l", KEYS[:5]) == 3

    @pytest.mark.parametrize("weights", ["others", None])
    def test_b3_c34_what_another_engine_uses_neither_counts_nor_goes(self, tier_settings, stored, weights):
        with TierEngine(FsspecTier, weights=weights, capacity="20KiB", **tier_settings) as theirs:
            theirs.store("s", KEYS[:5])
            with TierEngine(FsspecTier, capacity="20KiB", **tier_settings) as engine:
                engine.store("s", KEYS[:5])
                assert stored() == {theirs.namespace: 5, engine.namespace: 5}
                assert engine.load("l", KEYS[:5]) == theirs.load("l", KEYS[:5]) == 5

    def test_b3_c13_a_namespace_counts_an_hour_after_its_last_engine(self, tier_settings, stored, place):
        fs, directory = place
        with TierEngine(FsspecTier, weights="former", capacity="20KiB", **tier_settings) as former:
            former.store("s", KEYS[:5])
        with TierEngine(FsspecTier, capacity="20KiB", **tier_settings) as engine:
            engine.store("s", KEYS[:2])
            assert stored()[former.namespace] == 5, "others that know these weights may be about to use it"
        file = f"{directory.rpartition('/')[0]}/{former.namespace}/namespace.json"
        said = json.loads(fs.cat_file(file))
        assert time.time() + 3000 < said["in_use_until"] < time.time() + 3700
        fs.pipe_file(file, json.dumps({**said, "in_use_until": time.time() - 1}).encode())
        with TierEngine(FsspecTier, capacity="20KiB", **tier_settings) as engine:
            assert stored() == {former.namespace: 3, engine.namespace: 2}, "at the start"
            assert engine.load("l", KEYS[:2]) == 2

    def test_b3_c33_folders_that_are_no_namespaces_of_ours_stay(self, tier_settings, place):
        fs, directory = place
        root = directory.rpartition("/")[0]
        theirs = [f"{root}/{name}/ab/abcd.kv" for name in ("bare", "empty", "damaged", "text")]
        for path in theirs:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(path, bytes(5000))
        for name, said in (("empty", b"{}"), ("damaged", b"{"), ("text", b'{"in_use_until": "0"}')):
            fs.pipe_file(f"{root}/{name}/namespace.json", said)
        with TierEngine(FsspecTier, capacity="4KiB", **tier_settings) as engine:
            engine.store("s", KEYS[:1])
            assert engine.load("l", KEYS[:1]) == 1
        assert all(fs.exists(path) for path in theirs)


def store_until_it_works(tier: TierDriver, rows: dict[OffloadKey, bytes]) -> None:
    """Store again and again, as cascades would, until a store succeeds."""
    give_up = time.monotonic() + PATIENCE_S
    while (result := tier.store(rows)).error is not None:
        assert time.monotonic() < give_up, result.error


def block_path(directory: str, key: OffloadKey) -> str:
    return f"{directory}/{key.hex()[:2]}/{key.hex()}.kv"


def load(tier: FsspecTier, key: OffloadKey) -> bytes | None:
    into = bytearray(tier.context.row_bytes)
    return bytes(into) if tier.load(key, memoryview(into)) else None
