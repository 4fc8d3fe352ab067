"""Bytes and jobs: what the contract asks of every tier, tried as the core works with it, at either interface."""

from typing import Any

import pytest

from kvtier_core.plugins import check_tier_class
from kvtier_core.values import TierInfo
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
from kvtier_testing.lent import LentRows
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.rules import rule

_ROWS_A_STORE = 32
"""Fewer than the rows that are lent, so that many blocks take several jobs."""


class JobRules(TierFixtures):
    """What comes back, and how jobs end."""

    @rule
    def test_c51_the_class_is_a_tier_type(self, tier_class: type[Any]) -> None:
        """A tier type has ``Settings``, ``info`` and the methods of its interface, as the core calls them.

        Change what the list names; each line says what was expected.
        """
        check_tier_class(tier_class)

    # What comes back.

    @rule
    def test_c29_rows_come_back_whole_and_proven(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """A block comes back as it was stored, byte for byte. Payload, padding and proof are opaque to a tier.

        Store and load all of the buffer, whatever is in it. Mend this first: most other rules fail with it.
        If you go by addresses, see ``test_c29_only_the_rows_of_a_job_are_touched``.
        """
        tier = open_tier()
        rows = make_rows(maker, similar_keys(5))
        assert_moved(tier.store(rows))
        assert_contents(tier, rows)
        loaded = tier.load(list(rows))
        proven = [maker.proves(key, row) for key, row in loaded.rows.items()]
        assert all(proven), (
            f"{proven.count(False)} of {len(proven)} loaded rows lost their last bytes, the proof"
        )

    @rule
    def test_c52_keys_that_differ_in_their_last_bytes_are_apart(
        self, open_tier: OpenTier, maker: RowMaker
    ) -> None:
        """Two keys are two blocks, however alike they look.

        Use the whole key: do not cut it, decode it as text, or fold its case.
        """
        tier = open_tier()
        keys = similar_keys(10)
        rows = make_rows(maker, keys[::2])
        assert_moved(tier.store(rows))
        assert_contents(tier, rows, absent=keys[1::2])

    @rule
    def test_c02_groups_of_one_block_hash_are_apart(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """The last 4 bytes of a key are the group, and part of the key.

        Use the whole key.
        """
        tier = open_tier()
        by_group = [similar_keys(3, group=group) for group in (0, 1, 256, 1 << 24)]
        rows = make_rows(maker, [key for keys in by_group[:3] for key in keys])
        assert_moved(tier.store(rows))
        assert_contents(tier, rows, absent=by_group[3])

    @rule
    def test_c30_absent_keys_are_missing_and_not_failed(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Absence is no fault: a load reports absent keys as missing, and loads the others.

        Name absent keys in ``JobResult.missing``, or return False from ``load``; raise for faults alone.
        """
        tier = open_tier()
        keys = similar_keys(6)
        rows = make_rows(maker, keys[1:3])
        assert_moved(tier.store(rows))
        loaded = tier.load(keys)
        absent = [key for key in keys if key not in rows]
        assert_same_keys(loaded.result.missing, absent, "the keys that the load reported missing")
        assert not loaded.result.failed, "absent keys were reported as failed"
        assert loaded.result.error is None, f"absent keys were reported as an error: {loaded.result.error}"
        assert_rows(loaded.rows, rows)

    @rule
    def test_c10_a_lookup_has_one_bool_a_key_in_order(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """A lookup answers each key it is asked about once, in order: also no key, one key twice, and many keys.

        Build the answer by walking through ``job.keys``, not through a set of them.
        """
        tier = open_tier()
        keys = similar_keys(300)
        there = range(7, 7 + 4 * _ROWS_A_STORE)
        for begin in there[::_ROWS_A_STORE]:
            assert_moved(tier.store(make_rows(maker, keys[begin : begin + _ROWS_A_STORE])))
        assert_each(tier.lookup([]), [], "the lookup of no key")
        twice = tier.lookup([keys[7], keys[0], keys[7]])
        assert_each(twice, [True, False, True], "the lookup of one key twice")
        assert_each(tier.lookup(keys), [index in there for index in range(300)], "the lookup of many keys")

    @rule
    def test_c20_storing_twice_changes_nothing(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Storing a block that is there is no error, at the same time as the first store or after it.

        Replace the block, or keep it when its bytes are the same.
        """
        tier = open_tier()
        rows = make_rows(maker, similar_keys(3))
        first, second = tier.start_store(rows), tier.start_store(rows)
        assert_moved(tier.wait(second))
        assert_moved(tier.wait(first))
        assert_moved(tier.store(rows))
        assert_contents(tier, rows)

    @rule
    def test_c03_a_store_replaces_a_block_that_gave_wrong_bytes(
        self, open_tier: OpenTier, maker: RowMaker
    ) -> None:
        """A block that gave wrong bytes is replaced by the next store of its key.

        Write the new bytes, whatever is there. A tier that stores only what is absent has to forget the keys that
        ``discard`` names.
        """
        tier = open_tier()
        keys = similar_keys(4)
        rows = make_rows(maker, keys)
        damaged = {key: bytes([row[0] ^ 1]) + row[1:] for key, row in rows.items()}
        assert_moved(tier.store({**rows, keys[0]: damaged[keys[0]]}))
        tier.discard([keys[0]])
        assert_moved(tier.store({keys[0]: rows[keys[0]]}))
        assert_contents(tier, rows)

    @rule
    def test_c03_discarded_blocks_are_not_handed_out_until_they_are_stored_again(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """A block that gave wrong bytes is not handed out again until it is stored again; the others stay.

        Delete the keys that ``discard`` names, or mark them. Without that hook three flipped blocks cost every request
        their tokens.
        """
        tier = open_tier()
        if not tier.has("discard"):
            pytest.skip(
                "this tier has no discard hook: a block with wrong bytes is a miss until it is stored again"
            )
        if info.shared:
            pytest.skip("others use this tier's storage: a block may be read again, and found right")
        rows = make_rows(maker, similar_keys(6))
        assert_moved(tier.store(rows))
        keys = list(rows)
        tier.discard(keys[:2])
        assert_contents(tier, {key: rows[key] for key in keys[2:]}, absent=keys[:2])
        assert_moved(tier.store({key: rows[key] for key in keys[:2]}))
        assert_contents(tier, rows)

    # Jobs.

    @rule
    def test_c30_every_job_has_exactly_one_result(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Every job has one result, also a job with no keys.

        Answer each job that was submitted once, by its id.
        """
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

    @rule
    def test_c30_one_key_twice_in_a_job(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """A key that comes twice in a load has two buffers, and both are filled.

        Pair ``job.keys`` and ``job.buffers`` by position, not by key.
        """
        tier = open_tier()
        (key,) = similar_keys(1)
        rows = make_rows(maker, [key])
        assert_moved(tier.store(rows))
        buffers = [bytearray(maker.row_bytes) for _ in range(2)]
        assert_moved(tier.wait(tier.start_load([key, key], buffers)))
        assert_each(buffers, [rows[key], rows[key]], "the buffers of one key twice")

    @rule
    def test_c30_jobs_in_flight_together(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Many jobs are under way at a time, and every byte gets to its place.

        Keep what belongs to a job with the job: threads share neither buffers nor connections that take one call at a
        time.
        """
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

    @rule
    def test_c30_a_load_meets_the_store_of_its_keys(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """A load beside the store of its keys gives whole blocks or misses them: never a part, and never a fault.

        Make a block visible when all of it is written.
        """
        tier = open_tier()
        keys = similar_keys(8)
        rows = make_rows(maker, keys)
        store = tier.start_store(rows)
        loaded = tier.load(keys)
        assert not loaded.result.failed, f"a load beside the store failed: {loaded.result.error}"
        assert_whole(loaded.rows, rows)
        assert_moved(tier.wait(store))
        assert_contents(tier, rows)

    @rule
    def test_c30_cancelled_jobs_have_their_result(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """A cancelled job has its result all the same. Its blocks are there whole or not at all.

        Fail what has not begun, finish what has, and answer both.
        """
        tier = open_tier()
        rows = make_rows(maker, similar_keys(30))
        jobs = [tier.start_store({key: row}) for key, row in rows.items()]
        tier.cancel(jobs)
        for job in jobs:
            tier.wait(job)
        assert_whole(tier.load(list(rows)).rows, rows)
        assert_moved(tier.store(rows))
        assert_contents(tier, rows)

    # Buffers.

    @rule
    def test_c29_a_store_keeps_no_reference_to_its_buffer(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """The row of a store holds another block as soon as the result is out.

        Copy the bytes before the result; keep neither the buffer nor a slice of it.
        """
        tier = open_tier()
        rows = make_rows(maker, similar_keys(3))
        assert_moved(tier.store(rows))  # the kit writes another pattern into the rows now
        assert_contents(tier, rows)

    @rule
    def test_c29_only_the_rows_of_a_job_are_touched(
        self, open_tier: OpenTier, maker: RowMaker, pool_rows: LentRows
    ) -> None:
        """A load writes to the rows of its job and to no other, and a store reads these alone.

        Row *i* begins ``i * row_stride`` bytes behind ``PoolView.address``; ``job.rows`` has the numbers.
        """
        tier = open_tier()
        keys = similar_keys(12)
        rows = make_rows(maker, keys)
        for begin in range(0, 12, 3):
            assert_moved(tier.store({key: rows[key] for key in keys[begin : begin + 3]}))
        pool_rows.check()
        assert_contents(tier, rows, absent=similar_keys(4, seed=1))
        pool_rows.check()

    @rule
    def test_c29_rows_are_left_alone_after_the_result(
        self, open_tier: OpenTier, maker: RowMaker, pool_rows: LentRows
    ) -> None:
        """After a job's result its rows are another block's: a write to them is wrong bytes in an answer.

        Wait until the client is done with the memory before you answer, also after an error, a timeout or a cancel.
        """
        tier = open_tier()
        keys = similar_keys(6)
        rows = make_rows(maker, keys[:5])
        assert_moved(tier.store(rows))
        cancelled = tier.start_load(keys, [bytearray(maker.row_bytes) for _ in keys])
        tier.cancel([cancelled])
        tier.wait(cancelled)
        assert_contents(tier, rows, absent=keys[5:])
        more = make_rows(maker, similar_keys(6, seed=1))
        assert_moved(tier.store(more))
        assert_contents(tier, rows | more)
        self.watch_for_late_writes()
        pool_rows.check()
        tier.shutdown()
        pool_rows.check()
