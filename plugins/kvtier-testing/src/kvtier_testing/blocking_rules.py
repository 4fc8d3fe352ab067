"""What the blocking interface asks of a tier's own methods, called without the core around them.

The core asks a tier only what it does not know already, so that through the hooks much of this would never be tried.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from kvtier_core.blocktier import BlockTier, SupportsBatch, SupportsHolds, SupportsScan
from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierContext
from kvtier_testing.checks import assert_each
from kvtier_testing.fixtures import NAMESPACE, TierFixtures
from kvtier_testing.rows import RowMaker, similar_keys

_TIME_STEP_S = 0.5
"""By how much the times of two scans may differ: not by the time that lies between the two."""
_CLOCK_SLACK_S = 60.0  # a storage server has a clock of its own


class BlockingRules(TierFixtures):
    """The methods of ``BlockTier`` and its optional parts; skipped for tiers on the hook specs."""

    @pytest.fixture
    def blocking(
        self, tier_class: type[Any], tier_settings: Mapping[str, object], maker: RowMaker
    ) -> Iterator[BlockTier]:
        """The open tier without the core around it."""
        if not issubclass(tier_class, BlockTier):
            pytest.skip("this tier is on the hook specs")
        tier = tier_class(
            tier_class.Settings.model_validate({"type": "kit", **tier_settings}),
            TierContext(name="kit", namespace=NAMESPACE, row_bytes=maker.row_bytes),
        )
        tier.open()
        yield tier
        tier.close()

    def test_c52_contains_and_load_agree_and_absence_is_no_fault(
        self, blocking: BlockTier, maker: RowMaker
    ) -> None:
        """``load`` returns exactly ``True`` or ``False``, ``contains`` and ``holds`` one bool a key."""
        keys = similar_keys(6)
        for key in keys[::2]:
            _store(blocking, key, maker.make(key))
        assert_each(_contains(blocking, keys), [True, False] * 3, "contains, with every other key stored")
        if isinstance(blocking, SupportsHolds):
            assert_each(list(blocking.holds(keys)), [True, False] * 3, "holds, with every other key stored")
        loaded = [_load(blocking, key, maker.row_bytes) for key in keys]
        expected = [maker.make(key) if index % 2 == 0 else None for index, key in enumerate(keys)]
        assert_each(loaded, expected, "what load gave, None for absent keys")
        assert_each(_contains(blocking, []), [], "contains of no key")

    def test_c52_a_later_store_replaces_the_block(self, blocking: BlockTier, maker: RowMaker) -> None:
        """Storing under a key that is there is no error; whichever came last is read."""
        key, other = similar_keys(2)
        for version in (1, 2, 3):
            _store(blocking, key, maker.make(key, version))
            _assert_loads(blocking, key, maker.make(key, version))
        assert_each(_contains(blocking, [key, other]), [True, False], "contains of a stored and another key")

    def test_c52_delete_removes_what_is_named_and_nothing_else(
        self, blocking: BlockTier, maker: RowMaker
    ) -> None:
        """Absent keys are no error; a deleted key can be stored again."""
        keys = similar_keys(5)
        for key in keys[:4]:
            _store(blocking, key, maker.make(key))
        blocking.delete([keys[1], keys[4], keys[2]])
        blocking.delete([keys[1]])
        blocking.delete([])
        assert_each(
            _contains(blocking, keys), [True, False, False, True, False], "contains after the deletions"
        )
        assert _load(blocking, keys[1], maker.row_bytes) is None, "load found a deleted key"
        _assert_loads(blocking, keys[3], maker.make(keys[3]))
        _store(blocking, keys[1], maker.make(keys[1], 7))
        _assert_loads(blocking, keys[1], maker.make(keys[1], 7))

    def test_c52_scan_finds_every_block_once(self, blocking: BlockTier, maker: RowMaker) -> None:
        """With its key, its size and about the time of its store."""
        if not isinstance(blocking, SupportsScan):
            pytest.skip("this tier can't enumerate its blocks")
        keys = similar_keys(20)
        begin = time.time()
        for key in keys:
            _store(blocking, key, maker.make(key))
        blocking.delete(keys[15:])
        found = list(blocking.scan())
        assert_each(sorted(block.key for block in found), keys[:15], "the keys that scan found, sorted")
        for block in found:
            assert block.bytes >= maker.row_bytes, (
                f"scan says {block.bytes} bytes of a row of {maker.row_bytes}"
            )
            age = time.time() - block.time
            assert -_CLOCK_SLACK_S <= age <= time.time() - begin + _CLOCK_SLACK_S, (
                f"scan says a block just stored is {age:.0f} s old"
            )
        later = time.time() + 2 * _TIME_STEP_S
        while time.time() < later:
            time.sleep(_TIME_STEP_S / 10)
        times = {block.key: block.time for block in blocking.scan()}
        assert all(abs(times[block.key] - block.time) < _TIME_STEP_S for block in found), (
            "scan gives the same block another time each time: give that of its store, or its ttl begins anew with "
            "each start"
        )

    def test_c52_batches_answer_key_by_key(self, blocking: BlockTier, maker: RowMaker) -> None:
        """``True`` stored or filled, ``False`` absent, in order."""
        if not isinstance(blocking, SupportsBatch):
            pytest.skip("this tier moves blocks one by one")
        keys = similar_keys(6)
        rows = [maker.make(key) for key in keys]
        stored = list(blocking.store_many(keys[:4], [memoryview(row) for row in rows[:4]]))
        assert_each(stored, [True] * 4, "what store_many returned")
        asked = [keys[5], *keys[:4], keys[4]]
        intos = [bytearray(maker.row_bytes) for _ in asked]
        found = list(blocking.load_many(asked, [memoryview(into) for into in intos]))
        assert_each(found, [False, *[True] * 4, False], "what load_many returned")
        assert_each(intos[1:5], rows[:4], "the rows that load_many filled")

    def test_c52_close_twice_is_fine(self, blocking: BlockTier) -> None:
        """Once more at the end of the test."""
        blocking.close()
        blocking.close()


def _contains(tier: BlockTier, keys: Sequence[OffloadKey]) -> list[bool]:
    answers = tier.contains(keys)
    told = [answer for answer in answers if isinstance(answer, bool)]
    assert len(told) == len(answers), f"contains returned {answers!r}: it returns bools"
    return told


def _store(tier: BlockTier, key: OffloadKey, row: bytes) -> None:
    buffer = bytearray(row)
    # The interface promises None; an author who returns something else gets told.
    answer: object = tier.store(key, memoryview(buffer).toreadonly())
    assert answer is None, f"store returned {answer!r}: it returns None, or raises"
    buffer[:] = bytes(len(buffer))  # the row is another block's now


def _assert_loads(tier: BlockTier, key: OffloadKey, row: bytes) -> None:
    assert_each([_load(tier, key, len(row))], [row], "the loaded row")


def _load(tier: BlockTier, key: OffloadKey, row_bytes: int) -> bytes | None:
    buffer = bytearray(row_bytes)
    found = tier.load(key, memoryview(buffer))
    assert isinstance(found, bool), f"load returned {found!r}: it returns True or False, or raises"
    return bytes(buffer) if found else None
