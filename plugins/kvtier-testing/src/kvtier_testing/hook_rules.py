"""What the contract asks of every tier, tried through the hook specs."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier_core.blocktier import BlockTier
from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierEvent, TierInfo
from kvtier_testing.checks import (
    assert_contents,
    assert_each,
    assert_moved,
    assert_rows,
    assert_same_keys,
    assert_whole,
    make_rows,
)
from kvtier_testing.fixtures import OpenTier, TierFixtures
from kvtier_testing.rows import RowMaker, similar_keys


class HookRules(TierFixtures):
    """Bytes, jobs, room and lives of a tier, whichever way it is written."""

    # What comes back.

    def test_c29_rows_come_back_whole_and_proven(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Payload, padding and proof are opaque bytes to a tier."""
        tier = open_tier()
        rows = make_rows(maker, similar_keys(5))
        assert_moved(tier.store(rows))
        assert_contents(tier, rows)
        loaded = tier.load(list(rows))
        proven = [maker.proves(key, row) for key, row in loaded.rows.items()]
        assert all(proven), (
            f"{proven.count(False)} of {len(proven)} loaded rows lost their proof, the row's last bytes"
        )

    def test_c52_keys_that_differ_in_their_last_bytes_are_apart(
        self, open_tier: OpenTier, maker: RowMaker
    ) -> None:
        """Every key ever used is asked for: each stored one gives its own bytes, each other one is absent."""
        tier = open_tier()
        keys = similar_keys(40)
        stored = make_rows(maker, keys[::2])
        assert_moved(tier.store(stored))
        assert_contents(tier, stored, absent=keys[1::2])

    def test_k12_o1_groups_of_one_block_hash_are_apart(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """The group index is part of the key."""
        tier = open_tier()
        by_group = [similar_keys(3, group=group) for group in (0, 1, 256, 1 << 24)]
        rows = make_rows(maker, [key for keys in by_group[:3] for key in keys])
        assert_moved(tier.store(rows))
        assert_contents(tier, rows, absent=by_group[3])

    def test_c30_absent_keys_are_missing_and_not_failed(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Absence is no fault; the keys of a load that are there are loaded."""
        tier = open_tier()
        keys = similar_keys(6)
        rows = make_rows(maker, keys[1:3])
        assert_moved(tier.store(rows))
        loaded = tier.load(keys)
        absent = [key for key in keys if key not in rows]
        assert_same_keys(loaded.result.missing, absent, "the keys that the load reported missing")
        assert not loaded.result.failed, "absent keys are reported missing, not failed"
        assert loaded.result.error is None, f"absent keys are no error, but: {loaded.result.error}"
        assert_rows(loaded.rows, rows)

    def test_c10_a_lookup_has_one_bool_a_key_in_order(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Also for no key, for one key twice and for many keys."""
        tier = open_tier()
        keys = similar_keys(300)
        assert_moved(tier.store(make_rows(maker, keys[7:9])))
        assert_each(tier.lookup([]), [], "the lookup of no key")
        twice = tier.lookup([keys[7], keys[0], keys[7]])
        assert_each(twice, [True, False, True], "the lookup of one key twice")
        assert_each(tier.lookup(keys), [7 <= index < 9 for index in range(300)], "the lookup of many keys")

    def test_c20_storing_twice_changes_nothing(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """A second store succeeds, in one job with the first or after it."""
        tier = open_tier()
        rows = make_rows(maker, similar_keys(3))
        first, second = tier.start_store(rows), tier.start_store(rows)
        assert_moved(tier.wait(second))
        assert_moved(tier.wait(first))
        assert_moved(tier.store(rows))
        assert_contents(tier, rows)

    # Jobs.

    def test_c30_every_job_has_exactly_one_result(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Also when there is nothing to do. The driver refuses results that are not due."""
        tier = open_tier()
        keys = similar_keys(4)
        jobs = [
            tier.start_store({}),
            tier.start_load([], []),
            tier.start_lookup([]),
            tier.start_load(keys, [bytearray(maker.row_bytes) for _ in keys]),
            tier.start_store(make_rows(maker, keys)),
            tier.start_lookup(keys),
        ]
        for job in jobs:
            tier.wait(job)
        assert not tier.unanswered(), f"jobs without a result: {sorted(tier.unanswered())}"

    def test_c30_one_key_twice_in_a_job(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Both buffers are filled."""
        tier = open_tier()
        (key,) = similar_keys(1)
        rows = make_rows(maker, [key])
        assert_moved(tier.store(rows))
        buffers = [bytearray(maker.row_bytes) for _ in range(2)]
        assert_moved(tier.wait(tier.start_load([key, key], buffers)))
        assert_each(buffers, [rows[key], rows[key]], "the buffers of one key twice")

    def test_c30_jobs_in_flight_together(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Stores of different keys, then loads of all, each many at a time: every byte at its place."""
        tier = open_tier()
        keys = similar_keys(48)
        rows = make_rows(maker, keys)
        stores = [tier.start_store({key: rows[key] for key in keys[begin::12]}) for begin in range(12)]
        for job in reversed(stores):
            assert_moved(tier.wait(job))
        buffers = {key: bytearray(maker.row_bytes) for key in keys}
        loads = [
            tier.start_load(keys[begin : begin + 4], [buffers[key] for key in keys[begin : begin + 4]])
            for begin in range(0, 48, 4)
        ]
        for job in loads:
            assert_moved(tier.wait(job))
        assert_each(list(buffers.values()), list(rows.values()), "the buffers of many jobs")

    def test_c30_a_load_meets_the_store_of_its_keys(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """While a key is being stored, a load of it gives the whole row or misses: never a part, never a fault."""
        tier = open_tier()
        keys = similar_keys(8)
        rows = make_rows(maker, keys)
        store = tier.start_store(rows)
        loaded = tier.load(keys)
        assert not loaded.result.failed, f"a load beside the store failed: {loaded.result.error}"
        assert_whole(loaded.rows, rows)
        assert_moved(tier.wait(store))
        assert_contents(tier, rows)

    def test_c03_discarded_blocks_are_not_handed_out_until_they_are_stored_again(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """On a storage that others use, a block may be read again and found right."""
        tier = open_tier()
        if not tier.has("discard") or info.shared:
            pytest.skip("this tier forgets no block for wrong bytes")
        rows = make_rows(maker, similar_keys(6))
        assert_moved(tier.store(rows))
        keys = list(rows)
        tier.discard(keys[:2])
        assert_contents(tier, {key: rows[key] for key in keys[2:]}, absent=keys[:2])
        assert_moved(tier.store({key: rows[key] for key in keys[:2]}))
        assert_contents(tier, rows)

    def test_c10_a_tier_that_reports_its_contents_reports_all_of_them(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """A key that is not reported is never asked for; one that is reported and absent costs a load."""
        if not info.reports_contents:
            pytest.skip("this tier does not report what it holds")
        tier = open_tier(capacity_blocks=6)
        keys = similar_keys(15)
        for begin in range(0, 15, 3):
            tier.store(make_rows(maker, keys[begin : begin + 3]))
            resident = tier.resident()
            assert resident is not None, "it has no set of its contents"
            there = tier.lookup(keys)
            assert_each(
                resident.contains_many(keys), there, "the keys reported, beside those that lookups find"
            )
        tier.reset("kit-another")
        resident = tier.resident()
        assert resident is not None, "it has no set of its contents after a reset"
        assert not any(resident.contains_many(keys)), "keys of before the reset are reported after it"

    def test_c30_cancelled_jobs_have_their_result(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Whatever was cancelled is there whole or not at all, and can be stored later."""
        tier = open_tier()
        rows = make_rows(maker, similar_keys(30))
        jobs = [tier.start_store({key: row}) for key, row in rows.items()]
        tier.cancel(jobs)
        for job in jobs:
            tier.wait(job)
        assert_whole(tier.load(list(rows)).rows, rows)
        assert_moved(tier.store(rows))
        assert_contents(tier, rows)

    def test_c29_a_store_keeps_no_reference_to_its_buffer(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """The row is used for another block as soon as the result is out."""
        tier = open_tier()
        rows = make_rows(maker, similar_keys(3))
        buffers = {key: bytearray(row) for key, row in rows.items()}
        assert_moved(tier.store(buffers))
        for buffer in buffers.values():
            buffer[:] = bytes(len(buffer))
        assert_contents(tier, rows)

    def test_c29_buffers_are_left_alone_after_the_result(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """What the core writes to a row after a load is not written over by later work of the tier."""
        tier = open_tier()
        keys = similar_keys(6)
        rows = make_rows(maker, keys)
        assert_moved(tier.store(rows))
        buffers = [bytearray(maker.row_bytes) for _ in keys]
        assert_moved(tier.wait(tier.start_load(keys, buffers)))
        marks = [bytes([index]) * maker.row_bytes for index in range(6)]
        for buffer, mark in zip(buffers, marks, strict=True):
            buffer[:] = mark
        more = make_rows(maker, similar_keys(6, seed=1))
        assert_moved(tier.store(more))
        assert_contents(tier, rows | more)
        tier.shutdown()
        assert_each(buffers, marks, "buffers of a load, used by the core after its result")

    # Room.

    def test_c13_k3_o2_capacity_is_kept_and_stores_go_on(
        self, open_tier: OpenTier, maker: RowMaker, tier_class: type[Any]
    ) -> None:
        """5 a round into a tier of 10 blocks: each is accepted, use never passes the capacity and is what is there."""
        if not _is_bounded_by_core(tier_class):
            pytest.skip("this tier bounds itself")
        tier = open_tier(capacity_blocks=10)
        keys = similar_keys(5 * self.full_rounds)
        for begin in range(0, len(keys), 5):
            newest = make_rows(maker, keys[begin : begin + 5])
            assert_moved(tier.store(newest))
            present = [key for key, there in zip(keys, tier.lookup(keys), strict=True) if there]
            expected = min(10, begin + 5)
            assert len(present) == expected, f"{len(present)} blocks are there, not {expected}"
        last = make_rows(maker, keys[-10:])
        assert_contents(tier, last, absent=keys[:-10])

    def test_c16_events_replay_into_the_contents(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo, tier_class: type[Any]
    ) -> None:
        """Whoever follows the events knows what the tier holds, evictions included."""
        tier = open_tier(capacity_blocks=6) if info.bounded_by == "core" else open_tier()
        keys = similar_keys(15)
        believed: set[OffloadKey] = set()
        if not (info.reports_contents or issubclass(tier_class, BlockTier)):
            pytest.skip("this tier does not report what it holds")
        for begin in range(0, 15, 3):
            tier.store(make_rows(maker, keys[begin : begin + 3]))
            _replay(believed, tier.take_events())
            there = [key for key, is_there in zip(keys, tier.lookup(keys), strict=True) if is_there]
            assert_same_keys(
                believed, there, "the keys that the events leave, beside those that lookups find"
            )

    # Lives: restarts, namespaces, resets, instances, shutdown.

    def test_k7_o1_a_persistent_tier_has_its_blocks_after_a_restart(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """A new instance on the same storage serves them, and may store them again."""
        if not info.persistent:
            pytest.skip("this tier is not persistent")
        keys = similar_keys(12)
        rows = make_rows(maker, keys[:10])
        with open_tier() as first:
            assert_moved(first.store(rows))
        second = open_tier()
        assert_contents(second, rows, absent=keys[10:])
        assert_moved(second.store(rows))
        assert_contents(second, rows, absent=keys[10:])

    def test_c02_namespaces_are_apart(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """One key in two namespaces is two blocks."""
        other_maker = RowMaker("kit-other", self.payload_bytes)
        keys = similar_keys(4)
        one, other = open_tier(), open_tier(namespace="kit-other")
        assert_moved(one.store(make_rows(maker, keys[:3])))
        assert_contents(other, {}, absent=keys)
        assert_moved(other.store(make_rows(other_maker, keys[1:])))
        assert_contents(one, make_rows(maker, keys[:3]), absent=keys[3:])
        assert_contents(other, make_rows(other_maker, keys[1:]), absent=keys[:1])

    def test_k13_o4_instances_share_nothing(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """Two instances of a tier without storage behind it are two tiers."""
        if info.persistent or info.shared:
            pytest.skip("instances of this tier meet in their storage")
        one, other = open_tier(), open_tier()
        rows = make_rows(maker, similar_keys(2))
        assert_moved(one.store(rows))
        assert_contents(other, {}, absent=list(rows))
        other.reset("kit-reset")
        other.shutdown()
        assert_contents(one, rows)

    def test_k7_o4_c34_after_a_reset_everything_misses(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Stores in flight at the reset end, and don't surface; the tier then works for the new namespace."""
        tier = open_tier()
        keys = similar_keys(20)
        assert_moved(tier.store(make_rows(maker, keys[:10])))
        in_flight = tier.start_store(make_rows(maker, keys[10:]))
        tier.reset("kit-reset")
        assert_contents(tier, {}, absent=keys)
        tier.wait(in_flight)
        assert_contents(tier, {}, absent=keys)
        new_rows = make_rows(RowMaker("kit-reset", self.payload_bytes), keys[5:15])
        assert_moved(tier.store(new_rows))
        assert_contents(tier, new_rows, absent=keys[:5] + keys[15:])
        tier.reset("kit-reset-again")
        assert_contents(tier, {}, absent=keys)

    def test_c34_shutdown_twice_answers_every_job(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Each job has its result, before or after; nothing may touch a buffer any more."""
        tier = open_tier()
        rows = make_rows(maker, similar_keys(20))
        jobs = [tier.start_store({key: row}) for key, row in rows.items()]
        tier.shutdown()
        for job in jobs:
            tier.wait(job)
        tier.shutdown()
        assert not tier.unanswered(), f"jobs without a result: {sorted(tier.unanswered())}"
        assert not tier.drain(0.0), "drain_jobs names jobs after the shutdown"

    def test_c31_drain_names_no_job_that_has_ended(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """With time enough, all have."""
        tier = open_tier()
        if not tier.has("drain_jobs"):
            pytest.skip("this tier can't be drained")
        rows = make_rows(maker, similar_keys(10))
        job = tier.start_store(rows)
        assert not tier.drain(60.0), "drain_jobs names jobs although they had time to end"
        assert_moved(tier.wait(job))


def _is_bounded_by_core(tier_class: type[Any]) -> bool:
    return issubclass(tier_class, BlockTier) and tier_class.info.bounded_by == "core"


def _replay(contents: set[OffloadKey], events: Sequence[TierEvent]) -> None:
    for event in events:
        if event.kind == "cleared":
            contents.clear()
        elif event.kind == "stored":
            contents.update(event.keys)
        else:
            contents.difference_update(event.keys)
