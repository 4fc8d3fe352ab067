"""The disk tier's index by itself: runs of neighbouring slots change hands with one statement each."""

import os
import random
from collections.abc import Iterator

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_disk.extents.database import Database
from kvtier_disk.extents.index import Index
from kvtier_disk.extents.slot_runs import key_runs
from tests.tiers.extents import KEYS, MIB, direct, store

SLOTS = 200


@pytest.fixture
def index(tmp_path) -> Iterator[Index]:
    database = Database(tmp_path / "index.db", journal_bytes=MIB)
    yield Index.make(database, 1)
    database.close()


@pytest.fixture
def namespace(index) -> int:
    return index.add_namespace("ns", 4096, 1.0).id


@pytest.fixture
def owner(index, namespace) -> int:
    number: int = index.add_owner("lock", namespace)
    extent = index.begin_extent(namespace, number, SLOTS, MIB)
    assert index.finish_extent(extent)
    return number


def key_of(length: int) -> OffloadKey:
    return OffloadKey(os.urandom(length))


def other_than(key: OffloadKey) -> OffloadKey:
    return OffloadKey(bytes(byte ^ 1 for byte in key))


def test_neighbours_with_keys_of_one_length_are_one_run():
    a, b, c, d, e = pairs = [(key_of(36), 4), (key_of(36), 5), (key_of(8), 6), (key_of(8), 8), (key_of(8), 7)]
    assert list(key_runs(pairs)) == [(4, [a[0], b[0]]), (6, [c[0]]), (8, [d[0]]), (7, [e[0]])]
    assert list(key_runs([])) == []


@pytest.mark.parametrize("seed", range(5))
def test_c32_slots_hold_just_the_keys_they_were_given_whatever_their_lengths_and_order(
    index, namespace, owner, seed
):
    rng = random.Random(seed)
    places = index.claim(namespace, owner, SLOTS)
    assert places == sorted(places)
    pairs = [(key_of(rng.choice([1, 8, 36, 36, 36, 48])), place) for place in places]
    rng.shuffle(pairs)
    stored, rest = pairs[:150], pairs[150:]
    assert index.publish(namespace, owner, stored, [], 5.0) == [True] * 150
    assert set(index.pairs_of(namespace)) == set(stored)
    gone = [(other_than(key), place) for key, place in stored[:20]]
    index.forget(namespace, owner, [*gone, *stored[20:50]])
    assert set(index.pairs_of(namespace)) == {*stored[:20], *stored[50:]}
    index.unclaim(owner, [place for _, place in rest])
    free = {place for _, place in (*stored[20:50], *rest)}
    assert set(index.claim(namespace, owner, SLOTS)) == free
    victims = iter([[*gone, *stored[50:60]], stored[60:80], []])
    assert index.claim(namespace, owner, 50, lambda _: next(victims)) == sorted(
        place for _, place in stored[50:80]
    )
    assert set(index.pairs_of(namespace)) == {*stored[:20], *stored[80:]}


def test_c13_what_is_evicted_beyond_the_slots_asked_for_leaves_free_ones(index, namespace, owner):
    pairs = [(key_of(36), place) for place in index.claim(namespace, owner, SLOTS)]
    assert index.publish(namespace, owner, pairs, [], 5.0) == [True] * SLOTS
    victims = random.Random(0).sample(pairs, 50)
    places = sorted(place for _, place in victims)
    assert index.claim(namespace, owner, 10, lambda _: victims) == places[:10]
    assert set(index.pairs_of(namespace)) == set(pairs) - set(victims)

    def none_needed(_: int) -> list:
        raise AssertionError("there are free slots")

    other = index.add_owner("other", namespace)
    assert index.claim(namespace, other, 30, none_needed) == places[10:40]
    assert index.claim(namespace, owner, 30) == places[40:]


def test_c13_blocks_evicted_ahead_are_no_more_than_the_journal_has_room_for(tmp_path):
    rng, buffer = random.Random(0), memoryview(bytearray(4096))
    tier = direct(tmp_path, capacity=256 * MIB, row_bytes=4096)
    contents = tier._opened().opened.contents
    held = [0]
    while held[-1] >= held[-2:][0]:
        keys = [OffloadKey(rng.randbytes(36)) for _ in range(1000)]
        assert tier.store_many(keys, [buffer] * 1000) == [True] * 1000
        held.append(len(contents))
    slots = sum(row.slots for row in tier._opened().opened.index.extents())
    assert slots // 32 > 1024
    assert held[-1] == slots - 1024
    tier.close()


def test_c32_slots_that_are_another_owners_by_now_are_not_published(index, namespace, owner):
    other = index.add_owner("other", namespace)
    places = index.claim(namespace, owner, 12)
    index.unclaim(owner, places[3:9])
    taken = index.claim(namespace, other, 4)
    assert taken == places[3:7]
    pairs = [(key_of(36), place) for place in places]
    assert index.publish(namespace, owner, pairs, [], 5.0) == [True] * 3 + [False] * 6 + [True] * 3
    assert list(index.pairs_of(namespace)) == pairs[:3] + pairs[9:]
    assert index.publish(namespace, other, [(KEYS[0], place) for place in taken], [], 5.0) == [True] * 4


def test_c28_changes_are_kept_within_their_bound_without_a_look_at_the_extents_a_batch(
    index, namespace, owner
):
    slots, batch = 8192, 64
    assert index.finish_extent(index.begin_extent(namespace, owner, slots, MIB))
    statements: list[str] = []
    index.database._connection.set_trace_callback(statements.append)
    for number in range(100):
        stored = [(key_of(36), place) for place in index.claim(namespace, owner, batch)]
        assert index.publish(namespace, owner, stored, [], float(number)) == [True] * batch
    index.database._connection.set_trace_callback(None)
    with index.database.reading() as connection:
        (kept,) = connection.execute("SELECT sum(count) FROM changes").fetchone()
    bound = (slots + SLOTS) // 4
    assert bound <= kept <= bound + bound // 8 + 2 * batch
    assert sum("FROM extents" in statement for statement in statements) <= 100 * batch // (bound // 8) + 1


@pytest.mark.parametrize("evict", [False, True])
def test_c28_a_store_takes_fewer_statements_than_blocks(tmp_path, evict):
    tier = direct(tmp_path, capacity=(16 if evict else 64) * MIB)
    store(tier, *KEYS[:300])
    assert all(tier.contains(KEYS[:300])) is not evict
    statements: list[str] = []
    tier._opened().opened.index.database._connection.set_trace_callback(statements.append)
    assert store(tier, *KEYS[300:340]) == [True] * 40
    assert len(statements) <= 20, statements
    tier.close()
