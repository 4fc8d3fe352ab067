"""What the object-store tier owes on every server, beside the conformance tests."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_fsspec import following
from kvtier_fsspec.object_tier import ObjectTier
from kvtier_fsspec.packs import PackName
from kvtier_testing.checks import make_rows
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.fixtures import NAMESPACE
from kvtier_testing.rows import similar_keys
from kvtier_testing.tiers import TierTests, assert_contents
from tests.tiers.engine import TierEngine
from tests.tiers.fault_proxy import Answer, Forward, Request, hang_up
from tests.tiers.object_place import (
    KEYS,
    A,
    B,
    C,
    ObjectFixtures,
    Witness,
    everything,
    is_pack,
    load,
    make_tier,
    wait_until,
)


class ObjectTests(ObjectFixtures, TierTests):
    """Give it ``server_port`` of a server with a bucket named ``bucket``."""

    # Packs.

    def test_i18_blocks_of_one_store_are_one_object_of_rows_and_their_index(self, open_tier, maker, witness):
        rows = make_rows(maker, KEYS)
        with open_tier(threads=1) as tier:
            assert tier.store(rows).error is None
            assert_contents(tier, rows)
        (name,) = witness.packs()
        content = witness.get(f"{NAMESPACE}/packs/{name}")
        assert content.startswith(b"".join(rows.values()))
        read = PackName.read(name)
        assert (read.blocks, len(content)) == (len(KEYS), read.bytes(maker.row_bytes))

    def test_i18_neighbours_are_read_in_one_request(self, open_tier, maker, proxy):
        rows = make_rows(maker, KEYS)
        tier = open_tier(threads=1)
        tier.store(rows)
        proxy.requests.clear()
        assert tier.load(KEYS[2:9]).rows == make_rows(maker, KEYS[2:9])
        assert (
            len([request for request in proxy.requests if request.method == "GET" and is_pack(request)]) == 1
        )

    @pytest.mark.usefixtures("quick")
    def test_i18_s10_what_another_engine_stores_is_found_by_following(self, open_tier, maker):
        rows = make_rows(maker, KEYS)
        one, other = open_tier(), open_tier()
        one.store(rows)
        wait_until(lambda: other.lookup(KEYS) == [True] * len(KEYS))
        assert_contents(other, rows)

    @pytest.mark.usefixtures("quick")
    def test_i18_of_many_packs_the_newest_are_listed_and_found(self, open_tier, maker, proxy, monkeypatch):
        monkeypatch.setattr(following, "_FEW", 0)
        one, other = open_tier(), open_tier()
        wait_until(lambda: any("start-after" in request.path for request in proxy.requests))
        for number in range(3):
            rows = make_rows(maker, KEYS[4 * number : 4 * number + 4])
            one.store(rows)
            wait_until(partial(_has, other, list(rows)))
        assert_contents(other, make_rows(maker, KEYS))

    def test_i18_s2_a_lookup_makes_no_request(self, open_tier, maker, proxy, monkeypatch):
        monkeypatch.setattr(ObjectTier, "follow_interval", 3600.0)
        open_tier().store(make_rows(maker, KEYS[:6]))
        tier = open_tier()
        proxy.fault = everything(hang_up)
        assert tier.lookup(KEYS) == [True] * 6 + [False] * 6
        assert tier.backend.resident() is not None, "the engine's thread reads it"

    def test_i18_s2_a_start_lists_packs_while_it_signs(self, tier_settings, proxy):
        listed, answers = threading.Event(), []

        def sign(request: Request, forward: Forward) -> Answer:
            answers.append(listed.wait(PATIENCE_S))
            return forward(request)

        def look(request: Request, forward: Forward) -> Answer:
            listed.set()
            return forward(request)

        proxy.fault = lambda request: (
            sign if request.method == "PUT" else look if "packs" in request.path else None
        )
        make_tier(tier_settings).close()
        assert answers[:1] == [True], "a request of 20 ms for each would add up"

    def test_i18_ten_engines_that_store_one_prompt_at_once_leave_one_copy_of_it(
        self, tier_settings, maker, witness
    ):
        engines = [make_tier(tier_settings) for _ in range(10)]
        begin = threading.Barrier(len(engines))

        def store(engine: ObjectTier) -> Sequence[bool | Exception]:
            begin.wait()
            return engine.store_many(KEYS, [memoryview(maker.make(key)) for key in KEYS])

        with ThreadPoolExecutor(len(engines)) as pool:
            assert list(pool.map(store, engines)) == [[True] * len(KEYS)] * len(engines)
        assert len(witness.blocks()) == 10 * len(KEYS)

        def is_one_copy_left() -> bool:
            for engine in engines:
                engine.follow()
            return len(witness.blocks()) == len(KEYS)

        wait_until(is_one_copy_left)
        for engine in engines:
            engine.follow()
            assert engine.contains(KEYS) == [True] * len(KEYS)
            assert load(engine, KEYS[3]) == maker.make(KEYS[3])

    def test_s9_a_start_asks_for_packs_and_not_for_blocks(self, open_tier, maker, proxy):
        many = similar_keys(200)
        with open_tier(threads=1) as tier:
            for begin in range(0, len(many), 50):  # a driver has 64 rows
                tier.store(make_rows(maker, many[begin : begin + 50]))
        proxy.requests.clear()
        with open_tier() as tier:
            assert tier.lookup(many) == [True] * 200
        assert len(proxy.requests) < 20

    @pytest.mark.usefixtures("quick")
    def test_s11_what_another_engine_stored_is_not_stored_again(self, open_tier, maker, witness):
        rows = make_rows(maker, KEYS)
        one, other = open_tier(), open_tier()
        one.store(rows)
        wait_until(lambda: other.lookup(KEYS) == [True] * len(KEYS))
        before = witness.packs()
        assert other.store(rows).held == tuple(KEYS)
        assert witness.packs() == before

    def test_i18_removed_blocks_are_gone_for_all_and_can_be_stored_again(self, tier_settings, maker):
        one = make_tier(tier_settings)
        one.store_many(KEYS, [memoryview(maker.make(key)) for key in KEYS])
        one.delete([A, B])
        other = make_tier(tier_settings)
        assert other.contains(KEYS) == [False] * 2 + [True] * 10
        other.store(A, memoryview(maker.make(A)))
        again = make_tier(tier_settings)
        assert again.contains([A, B, C]) == [True, False, True]
        assert load(again, A) == maker.make(A)

    def test_i18_objects_of_the_first_version_are_no_blocks_and_stay(self, open_tier, maker, witness):
        path = f"{NAMESPACE}/{A.hex()[:2]}/{A.hex()}.kv"
        witness.put(path, maker.make(A))
        tier = open_tier()
        assert_contents(tier, {}, absent=[A])
        tier.store(make_rows(maker, [A]))
        assert_contents(tier, make_rows(maker, [A]), absent=[B])
        assert witness.get(path) == maker.make(A)

    # Damage.

    @pytest.mark.parametrize(
        "damage", [lambda index: index[:-1] + b"?", lambda _index: b"", lambda index: index[1:]]
    )
    def test_i18_k2_a_pack_with_a_damaged_index_is_not_served(
        self, open_tier, maker, witness, warnings, damage
    ):
        with open_tier(threads=1) as tier:
            tier.store(make_rows(maker, [A, B]))
            (name,) = witness.packs()
            tier.store(make_rows(maker, [C]))
        path = f"{NAMESPACE}/packs/{name}"
        content = witness.get(path)
        size = 2 * maker.row_bytes
        witness.put(path, content[:size] + damage(content[size:]))
        with open_tier() as tier:
            assert_contents(tier, make_rows(maker, [C]), absent=[A, B])
            assert tier.store(make_rows(maker, [A, B])).error is None
            assert_contents(tier, make_rows(maker, [A, B, C]))
        assert len([text for text in warnings() if "is damaged" in text]) <= 1

    def test_i18_k2_a_pack_that_became_shorter_gives_no_wrong_bytes(self, open_tier, maker, witness):
        tier = open_tier(threads=1)
        tier.store(make_rows(maker, [A, B]))
        (name,) = witness.packs()
        witness.put(f"{NAMESPACE}/packs/{name}", maker.make(A) + maker.make(B)[:4000])
        loaded = tier.load([A, B])
        assert set(loaded.result.failed) >= {B}
        assert all(row == maker.make(key) for key, row in loaded.rows.items())

    def test_s7_blocks_found_wrong_are_stored_over(self, open_tier, maker, witness):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        tier.store(rows)
        (name,) = witness.packs()
        path = f"{NAMESPACE}/packs/{name}"
        content = bytearray(witness.get(path))
        content[100] ^= 1
        witness.put(path, bytes(content))
        assert not maker.proves(A, tier.load([A]).rows[A])
        tier.discard([A])
        assert tier.store(rows).error is None
        assert_contents(tier, rows)
        assert_contents(open_tier(), rows)

    def test_c33_packs_removed_by_others_are_misses(self, open_tier, maker, witness):
        rows = make_rows(maker, [A, B])
        tier = open_tier(threads=1)
        tier.store(rows)
        (name,) = witness.packs()
        witness.remove(f"{NAMESPACE}/packs/{name}")
        loaded = tier.load([A, B])
        assert (loaded.result.error, loaded.result.missing) == (None, (A, B))
        assert tier.store(rows).error is None
        assert_contents(tier, rows)

    # Room.

    def test_i18_c13_the_capacity_is_kept_and_what_was_used_stays(self, tier_settings, maker, witness):
        tier = make_tier(tier_settings, capacity=10 * (maker.row_bytes + 200))
        tier.store(A, memoryview(maker.make(A)))
        for number, key in enumerate(similar_keys(30, seed=2)):
            tier.store(key, memoryview(maker.make(key)))
            assert len(witness.packs()) == min(10, number + 2)
            age(tier, minutes=2)
            tier.touch([A])
        assert load(tier, A) == maker.make(A)
        assert make_tier(tier_settings).contains([A]) == [True]

    def test_i18_c13_a_store_of_more_than_the_capacity_stays_within_it(self, tier_settings, maker, witness):
        tier = make_tier(tier_settings, capacity=17 * (maker.row_bytes + 100))
        many = similar_keys(100)
        assert tier.store_many(many, [memoryview(maker.make(key)) for key in many]) == [True] * 100
        assert 12 < len(witness.blocks()) <= 17
        assert tier.contains(many).count(True) == len(witness.blocks())

    @pytest.mark.usefixtures("quick")
    def test_i18_one_capacity_holds_for_several_engines(self, open_tier, maker, witness):
        engines = [open_tier(capacity_blocks=11, threads=1) for _ in range(2)]
        for round_ in range(6):
            for engine in engines:
                keys = similar_keys(5, seed=100 * round_ + engines.index(engine))
                assert engine.store(make_rows(maker, keys)).error is None
                for other in engines:
                    wait_until(partial(_has, other, keys))
                assert len(witness.blocks()) <= 11

    def test_i18_ttl_ends_the_life_of_a_pack(self, tier_settings, maker, witness):
        tier = make_tier({**tier_settings, "ttl": "100s"})
        tier.store(A, memoryview(maker.make(A)))
        tier.follow()
        assert tier.contains([A]) == [True]
        old = PackName.of(
            int((time.time() - 101) * 1000), "0" * 8, 1, len(witness.get(_only(witness))) - 8192
        )
        witness.put(f"{NAMESPACE}/packs/{old.text}", witness.get(_only(witness)))
        witness.remove(_only(witness, but=old.text))
        other = make_tier({**tier_settings, "ttl": "100s"})
        other.follow()
        assert other.contains([A]) == [False]
        assert witness.packs() == []

    def test_b3_c13_what_nobody_uses_counts_and_leaves_first(self, tier_settings, witness):
        names = []
        for _ in range(3):
            with TierEngine(ObjectTier, weights=None, capacity="24KiB", threads=1, **tier_settings) as engine:
                names.append(engine.namespace)
                for number in range(5):
                    engine.store(f"s{number}", KEYS[number : number + 1])
                assert engine.load("l", KEYS[:5]) == 5
        assert len(witness.names(f"{names[-1]}/packs")) == 5
        assert sum(len(witness.names(f"{name}/packs")) for name in names) <= 6

    def test_i18_c34_of_a_namespace_that_nobody_uses_only_kvtiers_objects_leave(
        self, tier_settings, maker, witness
    ):
        url = tier_settings["url"]
        inner = {**tier_settings, "url": f"{url}/left"}  # a tier that was given the URL of a namespace
        for settings, namespace in ((tier_settings, "left"), (inner, NAMESPACE)):
            tier = make_tier(settings, namespace=namespace)
            tier.store(A, memoryview(maker.make(A)))
            tier.close()
        witness.put("left/namespace.json", b'{"in_use_until": 0}')
        witness.put("left/packs/README", b"somebody else's")
        before = witness.names("left")
        tier = make_tier(tier_settings, capacity=maker.row_bytes + 100)
        tier.follow()
        tier.store(B, memoryview(maker.make(B)))
        tier._tenancy.renew(0)
        gone = set(before) - set(witness.names("left"))
        assert {name.partition("/")[0] for name in gone} == {"packs", "namespace.json"}
        assert len(gone) == 2
        tier.close()

    def test_remove_namespace_leaves_nothing_of_it_and_all_of_others(self, tier_settings, maker, witness):
        mine, theirs = make_tier(tier_settings), make_tier(tier_settings, namespace="theirs")
        for tier in (mine, theirs):
            tier.store(A, memoryview(maker.make(A)))
        mine.remove_namespace()
        mine.remove_namespace()
        assert witness.names(NAMESPACE) == []
        assert (mine.contains([A]), theirs.contains([A])) == ([False], [True])
        mine.follow()
        mine.close()
        assert witness.names(NAMESPACE) == []


def _has(tier: TierDriver, keys: Sequence[OffloadKey]) -> bool:
    return tier.lookup(keys) == [True] * len(keys)


def _only(witness: Witness, *, but: str = "") -> str:
    (name,) = [name for name in witness.packs() if name != but]
    return f"{NAMESPACE}/packs/{name}"


def age(tier: ObjectTier, *, minutes: int) -> None:
    """As if what is there had been used so much earlier."""
    for pack in tier._table._packs.values():
        pack.used -= 60 * minutes
