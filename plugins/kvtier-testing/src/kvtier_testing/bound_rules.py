"""Room and age: whether what a type declares to enforce (``bounded_by``, ``ttl_by``) is enforced, and told."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier_core.blocktier import BlockTier
from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierEvent, TierInfo
from kvtier_testing.checks import (
    KEYS_A_LOAD,
    assert_contents,
    assert_each,
    assert_moved,
    assert_same_keys,
    make_rows,
)
from kvtier_testing.driving import TierDriver
from kvtier_testing.fixtures import OpenTier, Spaces, TierFixtures
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.rules import rule

_LONG_TTL_S, _SHORT_TTL_S = 60.0, 1.0


class BoundRules(TierFixtures):
    """Capacity, age, and what is told about both."""

    @rule
    def test_c13_capacity_is_kept_and_stores_go_on(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """The core keeps a tier inside its capacity by ``delete``, and every store finds room.

        Remove what ``delete`` names, and return when it is removed.
        """
        if info.bounded_by != "core":
            pytest.skip(f"bounded by the {info.bounded_by}")
        tier = open_tier(capacity_blocks=10)
        keys = similar_keys(5 * self.full_rounds)
        for begin in range(0, len(keys), 5):
            assert_moved(tier.store(make_rows(maker, keys[begin : begin + 5])))
            present = _present(tier, keys)
            expected = min(10, begin + 5)
            assert len(present) == expected, f"{len(present)} blocks are there, not {expected}"
        assert_contents(tier, make_rows(maker, keys[-10:]), absent=keys[:-10])

    @rule
    def test_c55_a_tier_that_bounds_itself_keeps_to_its_capacity(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """A tier that bounds itself holds at most ``context.capacity_bytes``, and takes new blocks when it is full.

        Let older blocks go before a store, and report them by ``context.report_evicted``. If the storage has a limit of
        its own, say ``bounded_by="storage"``: then the setting is refused.
        """
        if info.bounded_by != "tier":
            pytest.skip(f"bounded by the {info.bounded_by}")
        most = self.least_blocks
        tier = open_tier(capacity_blocks=most)
        keys = similar_keys(3 * most)
        step = min(KEYS_A_LOAD, max(1, most // 4))
        newest = keys[:0]
        for begin in range(0, len(keys), step):
            newest = keys[begin : begin + step]
            assert_moved(tier.store(make_rows(maker, newest)))
        present = _present(tier, keys)
        assert len(present) <= most, f"{len(present)} blocks are there, in a capacity of {most}"
        assert _present(tier, newest), "of the blocks stored last none is there"
        if not info.shared:
            assert_contents(tier, make_rows(maker, present))

    @rule
    def test_c55_blocks_younger_than_ttl_stay(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """A tier with ``ttl_by="tier"`` serves a block for ``settings.ttl`` seconds.

        ``ttl`` is in seconds: look for a client that wants milliseconds.
        """
        if info.ttl_by != "tier":
            pytest.skip("this tier does not say that it ends old blocks (ttl_by)")
        tier = open_tier(ttl=_LONG_TTL_S)
        rows = make_rows(maker, similar_keys(3))
        assert_moved(tier.store(rows))
        self.watch_for_late_writes()
        missing = tier.load(list(rows)).result.missing
        assert not missing, f"with a ttl of {_LONG_TTL_S:g} s blocks are gone at once"

    @rule
    def test_c55_blocks_older_than_ttl_end(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """A tier with ``ttl_by="tier"`` does not serve a block that is older than ``settings.ttl`` seconds.

        Hand ``ttl`` to the server with each store, or compare ages when a block is loaded. A tier that ignores it
        leaves ``ttl_by`` out: then the setting is refused.
        """
        if info.ttl_by != "tier":
            pytest.skip("this tier does not say that it ends old blocks (ttl_by)")
        tier = open_tier(ttl=_SHORT_TTL_S)
        (key,) = similar_keys(1)
        assert_moved(tier.store(make_rows(maker, [key])))
        give_up = time.monotonic() + _SHORT_TTL_S + self.patience_s
        while not tier.load([key]).result.missing:
            late = time.monotonic() - give_up + self.patience_s
            assert late < self.patience_s, (
                f"{late:.1f} s after its ttl of {_SHORT_TTL_S:g} s a block is still served"
            )
            time.sleep(0.02)

    @rule
    def test_c10_a_tier_that_reports_its_contents_reports_all_of_them(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo, spaces: Spaces
    ) -> None:
        """A tier with ``reports_contents`` reports every block: a key that is not reported is never asked for.

        Report what ``on_open`` or ``reset`` found before it returns, and what leaves later. The core adds what it
        stores.
        """
        if not info.reports_contents:
            pytest.skip("this tier does not report what it holds")
        tier = open_tier(capacity_blocks=self.least_blocks)
        keys = similar_keys(2 * self.least_blocks)
        step = min(KEYS_A_LOAD, max(1, self.least_blocks // 4))
        for begin in range(0, len(keys), step):
            tier.store(make_rows(maker, keys[begin : begin + step]))
            resident = tier.resident()
            assert resident is not None, "it has no set of its contents"
            what = "the keys reported, against those that lookups find"
            assert_each(resident.contains_many(keys), tier.lookup(keys), what)
        tier.reset(spaces("another"))
        resident = tier.resident()
        assert resident is not None, "it has no set of its contents after a reset"
        assert not any(resident.contains_many(keys)), "keys of before the reset are reported after it"

    @rule
    def test_c16_events_replay_into_the_contents(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo, tier_class: type[Any]
    ) -> None:
        """The events of a tier, replayed, give what it holds, evictions included.

        Report each block that leaves by ``context.report_evicted``.
        """
        if not (info.reports_contents or issubclass(tier_class, BlockTier)):
            pytest.skip("this tier does not report what it holds")
        tier = open_tier(capacity_blocks=6) if info.bounded_by == "core" else open_tier()
        keys = similar_keys(15)
        believed: set[OffloadKey] = set()
        for begin in range(0, 15, 3):
            tier.store(make_rows(maker, keys[begin : begin + 3]))
            _replay(believed, tier.take_events())
            what = "the keys that the events leave, against those that lookups find"
            assert_same_keys(believed, _present(tier, keys), what)


def _present(tier: TierDriver, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
    return [key for key, is_there in zip(keys, tier.lookup(keys), strict=True) if is_there]


def _replay(contents: set[OffloadKey], events: Sequence[TierEvent]) -> None:
    for event in events:
        if event.kind == "cleared":
            contents.clear()
        elif event.kind == "stored":
            contents.update(event.keys)
        else:
            contents.difference_update(event.keys)
