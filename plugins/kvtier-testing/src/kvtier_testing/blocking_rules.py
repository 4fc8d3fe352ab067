"""What the blocking interface asks of a tier's own methods, called without the core around them.

The core asks a tier only what it does not know already, so that through it much of this would never be tried.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from kvtier_core.blocktier import (
    BlockTier,
    SupportsBatch,
    SupportsFollow,
    SupportsHolds,
    SupportsMarks,
    SupportsRemoval,
    SupportsScan,
)
from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierInfo
from kvtier_testing.checks import assert_contents, assert_each, assert_moved, make_rows
from kvtier_testing.direct import DirectTier
from kvtier_testing.fixtures import OpenDirect, OpenTier, Spaces, TierFixtures
from kvtier_testing.lent import LentRows
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.rules import rule

_TIME_STEP_S = 0.5
"""By how much the times of two scans may differ: not by the time that lies between the two."""
_CLOCK_SLACK_S = 60.0  # a storage server has a clock of its own
_MOST_KEYS = 256
"""As many as the core asks about in one call."""
_LIKE_TRANSIENT = ("ConnectionError", "TimeoutError")


class BlockingRules(TierFixtures):
    """The methods of ``BlockTier`` and its optional parts; skipped for tiers on the hook specs."""

    @rule
    def test_c52_contains_and_load_agree_and_absence_is_no_fault(
        self, open_direct: OpenDirect, maker: RowMaker
    ) -> None:
        """A block is there, whole, when ``store`` has returned: all of its bytes, under all of its key.

        ``load`` returns exactly True or False, ``contains`` and ``holds`` one bool a key. Wait in ``store`` until the
        block can be read, use all of the key, and fill all of ``into``. Return False for a block that is not there;
        raise when the storage could not be asked.
        """
        tier = open_direct()
        keys = similar_keys(6)
        for key in keys[::2]:
            tier.store(key, maker.make(key))
        assert_each(tier.contains(keys), [True, False] * 3, "contains, with every other key stored")
        if isinstance(tier.tier, SupportsHolds):
            assert_each(tier.holds(keys), [True, False] * 3, "holds, with every other key stored")
        loaded = [tier.load(key) for key in keys]
        expected = [maker.make(key) if index % 2 == 0 else None for index, key in enumerate(keys)]
        assert_each(loaded, expected, "what load gave, None for absent keys")
        assert_each(tier.contains([]), [], "contains of no key")
        many = similar_keys(_MOST_KEYS)
        for count in (16, 64, _MOST_KEYS):  # a long answer of a server comes in parts
            began = time.monotonic()
            there = [key in keys[::2] for key in many[:count]]
            assert_each(tier.contains(many[:count]), there, f"contains of {count} keys")
            if time.monotonic() - began > 1.0:
                break  # the core asks so slow a tier in smaller parts

    @rule
    def test_c52_a_later_store_replaces_the_block(self, open_direct: OpenDirect, maker: RowMaker) -> None:
        """A store under a key that is there is no error, and the bytes that came last are read.

        Replace what is there, such as by ``INSERT OR REPLACE``.
        """
        tier = open_direct()
        key, other = similar_keys(2)
        for version in (1, 2, 3):
            tier.store(key, maker.make(key, version))
            assert_each([tier.load(key)], [maker.make(key, version)], "the block after a later store")
        assert_each(tier.contains([key, other]), [True, False], "contains of a stored and another key")

    @rule
    def test_c52_delete_removes_what_is_named_and_nothing_else(
        self, open_direct: OpenDirect, maker: RowMaker
    ) -> None:
        """``delete`` removes the blocks that it names. An absent key is no error, and may be stored again.

        Pass over keys that are not there, and remove by whole names, not by patterns.
        """
        tier = open_direct()
        keys = similar_keys(5)
        for key in keys[:4]:
            tier.store(key, maker.make(key))
        tier.delete([keys[1], keys[4], keys[2]])
        tier.delete([keys[1]])
        tier.delete([])
        assert_each(tier.contains(keys), [True, False, False, True, False], "contains after the deletions")
        assert tier.load(keys[1]) is None, "load found a deleted key"
        assert_each([tier.load(keys[3])], [maker.make(keys[3])], "a block that was not deleted")
        tier.store(keys[1], maker.make(keys[1], 7))
        assert_each([tier.load(keys[1])], [maker.make(keys[1], 7)], "a block that was stored again")

    @rule
    def test_c52_scan_finds_every_block_once(self, open_direct: OpenDirect, maker: RowMaker) -> None:
        """``scan`` names each block once, with its key, its size and the time of its store.

        Keep that time with the block: a scan that says "now" lets the ttl of all blocks begin again at each start.
        """
        tier = open_direct()
        if not isinstance(tier.tier, SupportsScan):
            pytest.skip("this tier has no scan")
        keys = similar_keys(20)
        begin = time.time()
        for key in keys:
            tier.store(key, maker.make(key))
        tier.delete(keys[15:])
        found = tier.scan()
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
        times = {block.key: block.time for block in tier.scan()}
        assert all(abs(times[block.key] - block.time) < _TIME_STEP_S for block in found), (
            "scan gives the same block another time each time"
        )

    @rule
    def test_c52_marks_are_told_again_by_scan(self, open_direct: OpenDirect, maker: RowMaker) -> None:
        """A time that ``mark_used`` was given comes back as ``BlockInfo.used``. Absent keys are passed over.

        Write the time beside the block, without changing the time of its store.
        """
        tier = open_direct()
        if not isinstance(tier.tier, SupportsMarks) or not isinstance(tier.tier, SupportsScan):
            pytest.skip("this tier has no mark_used")
        keys = similar_keys(3)
        for key in keys[:2]:
            tier.store(key, maker.make(key))
        before = {block.key: block.time for block in tier.scan()}
        used = time.time() + 3600
        tier.call("mark_used", {keys[0]: used, keys[2]: used})
        found = {block.key: block for block in tier.scan()}
        assert_each(sorted(found), keys[:2], "the keys that scan found after mark_used, sorted")
        told = found[keys[0]].used
        assert told is not None, "scan does not say when a block was used"
        assert abs(told - used) < _CLOCK_SLACK_S, (
            f"scan says {told:.0f} for a block that was used at {used:.0f}"
        )
        moved = [key for key in keys[:2] if abs(found[key].time - before[key]) > _TIME_STEP_S]
        assert not moved, "mark_used changed the time of the store, which is the block's age"

    @rule
    def test_c52_batches_answer_key_by_key(self, open_direct: OpenDirect, maker: RowMaker) -> None:
        """``store_many`` and ``load_many`` answer each key, in order: True when it was moved, False when absent.

        Go through the keys by position, and let one key's fault fail that key alone.
        """
        tier = open_direct()
        if not isinstance(tier.tier, SupportsBatch):
            pytest.skip("this tier moves blocks one by one (no store_many, load_many)")
        keys = similar_keys(6)
        rows = [maker.make(key) for key in keys]
        assert_each(tier.store_many(keys[:4], rows[:4]), [True] * 4, "what store_many returned")
        loaded = tier.load_many([keys[5], *keys[:4], keys[4]])
        assert_each(loaded, [None, *rows[:4], None], "what load_many gave, None for absent keys")
        later = [maker.make(key, 2) for key in keys[:2]]
        assert_each(
            tier.store_many(keys[:2], later), [True] * 2, "what store_many returned for blocks that are there"
        )
        assert_each(tier.load_many(keys[:3]), [*later, rows[2]], "the blocks after a later store_many")

    @rule
    def test_c52_close_twice_is_fine(self, open_direct: OpenDirect) -> None:
        """A second ``close`` does nothing.

        Forget in ``close`` what it has closed.
        """
        tier = open_direct()
        tier.close()
        tier.close()

    @rule
    def test_c29_a_load_writes_nothing_after_its_return(
        self, open_direct: OpenDirect, maker: RowMaker, pool_rows: LentRows
    ) -> None:
        """After ``load`` has returned or raised, its memory is another block's, also for an absent block.

        Wait until the client has let go of the memory, above all when you hand it a native pointer and give up early.
        """
        tier = open_direct()
        keys = similar_keys(4)
        for key in keys[:3]:
            tier.store(key, maker.make(key))
        for key in keys:
            tier.load(key)
        self.watch_for_late_writes()
        pool_rows.check()
        tier.close()
        pool_rows.check()

    @rule
    def test_c02_scan_delete_and_removal_keep_to_their_namespace(
        self, open_direct: OpenDirect, maker: RowMaker, spaces: Spaces
    ) -> None:
        """``scan``, ``delete`` and ``remove_namespace`` see the blocks of ``context.namespace`` and no others.

        Make the namespace part of each name and pattern. Never empty a server (FLUSHALL), table or bucket: other
        engines and other programs use it.
        """
        other_maker = RowMaker(spaces("other"), self.payload_bytes)
        one, other = open_direct(), open_direct(other_maker.namespace)
        keys = similar_keys(6)
        for key in keys[:4]:
            one.store(key, maker.make(key))
        for key in keys[2:]:
            other.store(key, other_maker.make(key))
        for tier, own in ((one, keys[:4]), (other, keys[2:])):
            if isinstance(tier.tier, SupportsScan):
                found = sorted(block.key for block in tier.scan())
                assert_each(found, own, "the keys that scan found, of one of two namespaces")
        one.delete(keys[2:])
        assert_each(
            [other.load(key) for key in keys[2:]],
            [other_maker.make(key) for key in keys[2:]],
            "the blocks of another namespace, after a delete of their keys in this one",
        )
        if isinstance(one.tier, SupportsRemoval):
            one.call("remove_namespace")
            assert_each(one.contains(keys), [False] * 6, "contains after remove_namespace")
            assert_each(
                [other.load(key) for key in keys[2:]],
                [other_maker.make(key) for key in keys[2:]],
                "the blocks of another namespace, after remove_namespace of this one",
            )

    @rule
    def test_c52_another_instance_sees_each_change(
        self, open_direct: OpenDirect, maker: RowMaker, info: TierInfo
    ) -> None:
        """In a shared tier, ``contains`` and ``load`` of one instance see what another stored and deleted.

        Ask the storage each time. What you remember must end, or be corrected by ``follow``.
        """
        if not info.shared:
            pytest.skip("this tier does not say that others use its storage (shared)")
        one, other = open_direct(), open_direct()
        keys = similar_keys(3)
        assert_each(other.contains(keys), [False] * 3, "contains of blocks that nobody stored")
        for key in keys[:2]:
            one.store(key, maker.make(key))
        self._wait_for(other, keys, [True, True, False], "another instance stored")
        assert_each([other.load(keys[0])], [maker.make(keys[0])], "a block that another instance stored")
        one.delete(keys[:1])
        self._wait_for(other, keys, [False, True, False], "another instance deleted")
        assert other.load(keys[0]) is None, "load found a block that another instance deleted"

    def _wait_for(
        self, tier: DirectTier, keys: Sequence[OffloadKey], expected: Sequence[bool], what: str
    ) -> None:
        give_up = time.monotonic() + self.patience_s
        while True:
            if isinstance(tier.tier, SupportsFollow):
                tier.call("follow")
            if (told := tier.contains(keys)) == expected:
                return
            assert time.monotonic() < give_up, (
                f"contains says {told} and not {expected}, {self.patience_s:g} s after {what}"
            )
            time.sleep(_TIME_STEP_S / 10)

    # Faults.

    @rule
    def test_c52_a_call_that_fails_for_a_moment_is_made_again(
        self, open_tier: OpenTier, tier_class: type[Any], maker: RowMaker
    ) -> None:
        """A call that raised a transient exception (``ConnectionError``, ``TimeoutError``, ``transient``) is repeated.

        Leave nothing half-done behind, such as a connection in the middle of a reply: close it and connect again.
        """
        if not issubclass(tier_class, BlockTier):
            pytest.skip("this tier is on the hook specs: it repeats calls itself")
        rows = make_rows(maker, similar_keys(3))
        kinds: tuple[type[Exception], ...] = (ConnectionError, TimeoutError, *tier_class.transient)
        for kind in kinds:
            tier = open_tier(_stumbling(tier_class, kind))
            assert_moved(tier.store(rows))
            assert_contents(tier, rows)
            tier.shutdown()

    @rule
    def test_c52_the_clients_own_transient_exceptions_are_named(
        self, tier_class: type[Any], info: TierInfo
    ) -> None:
        """A client's ``ConnectionError`` and ``TimeoutError`` are repeated if they are Python's, or named.

        Set ``transient = (client.ConnectionError, client.TimeoutError)`` in the class, or ``transient = ()`` if your
        code turns them into Python's.
        """
        del info
        if not issubclass(tier_class, BlockTier):
            pytest.skip("this tier is on the hook specs: it repeats calls itself")
        if any("transient" in vars(base) for base in tier_class.__mro__ if base is not BlockTier):
            return
        unnamed = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in _clients_errors(tier_class)})
        assert not unnamed, (
            f"{', '.join(unnamed)}: the class does not say whether a call that raises it is repeated"
        )

    @rule
    def test_c52_an_optional_ability_is_whole(self, open_direct: OpenDirect) -> None:
        """An optional ability has all its parts: ``follow`` needs ``follow_interval``, in seconds.

        Set ``follow_interval`` in the class or the constructor.
        """
        tier = open_direct()
        has_part = hasattr(tier.tier, "follow") or hasattr(tier.tier, "follow_interval")
        if not has_part:
            pytest.skip("this tier has no follow")
        assert isinstance(tier.tier, SupportsFollow), (
            "of follow and follow_interval one is missing: nobody calls follow"
        )


def _stumbling(tier_class: type[Any], kind: type[Exception]) -> type[Any]:
    """The tier, whose every method that moves blocks raises such an exception the first time."""

    def stumble(method: str) -> Any:  # noqa: ANN401 - a method
        calls: list[None] = []

        def tried(self: Any, *arguments: Any) -> Any:  # noqa: ANN401 - whatever the method takes
            calls.append(None)
            if len(calls) == 1:
                raise kind.__new__(kind, "made by the kit")
            return getattr(super(stumbling, self), method)(*arguments)

        return tried

    moving = ("store", "load", "store_many", "load_many")
    stumbling = type(
        f"Stumbling{tier_class.__name__}",
        (tier_class,),
        {method: stumble(method) for method in moving if hasattr(tier_class, method)},
    )
    return stumbling


def _clients_errors(tier_class: type[Any]) -> Iterator[type[Exception]]:
    """Exceptions called like Python's transient ones, of the modules that the tier's package imports."""
    package = tier_class.__module__.partition(".")[0]
    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]
    for module in ours:
        for value in list(vars(module).values()):
            candidates: Mapping[str, object] = vars(value) if isinstance(value, ModuleType) else {"": value}
            for found in candidates.values():
                if not isinstance(found, type) or not issubclass(found, Exception):
                    continue
                if found.__name__ in _LIKE_TRANSIENT and not issubclass(
                    found, (ConnectionError, TimeoutError)
                ):
                    yield found
