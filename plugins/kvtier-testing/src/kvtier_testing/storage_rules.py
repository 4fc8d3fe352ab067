"""A storage that several instances or namespaces use at a time, tried through the core's way to the tier."""

import time
from collections.abc import Callable, Sequence

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierInfo
from kvtier_testing.checks import assert_moved, make_rows
from kvtier_testing.driving import TierDriver
from kvtier_testing.fixtures import OpenTier, TierFixtures
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.rules import rule

_ROUNDS = 12
_LOOK_S = 0.02


class StorageRules(TierFixtures):
    """Two live instances, as two engines have."""

    @rule
    def test_c52_what_one_instance_stores_another_finds(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """A shared tier finds what another instance stored, also when it was asked before, and knew of nothing.

        Ask the storage, keep no index of one process, and remember no absence for long. Or write ``follow``.
        """
        _needs_sharing(info)
        one, other = open_tier(), open_tier()
        rows = make_rows(maker, similar_keys(4))
        keys = list(rows)
        assert other.lookup(keys) == [False] * 4, "another instance finds blocks that nobody stored"
        assert_moved(one.store(rows))
        self._wait_until(
            lambda: other.lookup(keys) == [True] * 4, "it still does not find what the other stored"
        )
        assert other.load(keys).rows == rows, "another instance finds blocks and loads others, or none"

    @rule
    def test_c52_what_one_instance_removed_another_misses(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """A shared tier misses what another instance removed: it is no fault, and it is not found for ever.

        Remember no presence for long, and answer an absent block with False or ``missing``.
        """
        _needs_sharing(info)
        one, other = open_tier(), open_tier()
        if not one.has("discard"):
            pytest.skip("the kit has no way to remove a block from this tier")
        rows = make_rows(maker, similar_keys(3))
        keys = list(rows)
        assert_moved(one.store({key: bytes([row[0] ^ 1]) + row[1:] for key, row in rows.items()}))
        self._wait_until(lambda: all(other.lookup(keys)), "it still does not find what the other stored")
        one.discard(keys)  # wrong bytes, also when they are read again: they are removed for all

        def misses() -> bool:
            loaded = other.load(keys)
            assert not loaded.result.failed, f"a load of removed blocks failed: {loaded.result.error}"
            return len(loaded.result.missing) == len(keys) and not any(other.lookup(keys))

        self._wait_until(misses, "it still finds what the other removed")

    @rule
    def test_c32_a_reader_beside_the_writer_sees_whole_blocks(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """While one instance writes a block, others find it whole or not at all, also one that opens just then.

        Write elsewhere and rename, or put the block in one request, or write the part last that makes it visible.
        """
        _needs_sharing(info)
        writer, reader = open_tier(), open_tier()
        keys = similar_keys(6)
        for version in range(1, 1 + _ROUNDS):
            job = writer.start_store({key: maker.make(key, version) for key in keys})
            while job in writer.unanswered():
                self._assert_whole(reader, maker, keys, version)
            if version % 4 == 0:
                with open_tier() as newcomer:
                    job_beside = writer.start_store({key: maker.make(key, version) for key in keys})
                    self._assert_whole(newcomer, maker, keys, version)
                    assert_moved(writer.wait(job_beside))
            assert_moved(writer.wait(job))

    @staticmethod
    def _assert_whole(tier: TierDriver, maker: RowMaker, keys: Sequence[OffloadKey], newest: int) -> None:
        loaded = tier.load(keys)
        assert not loaded.result.failed, f"a load beside the writer failed: {loaded.result.error}"
        for key, row in loaded.rows.items():
            assert maker.proves(key, row), (
                f"a block was read half-written, while it was stored (round {newest} of {_ROUNDS})"
            )

    def _wait_until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        give_up = time.monotonic() + self.patience_s
        while not is_so():
            assert time.monotonic() < give_up, f"after {self.patience_s:g} s {otherwise}"
            time.sleep(_LOOK_S)


def _needs_sharing(info: TierInfo) -> None:
    if not info.shared:
        pytest.skip("this tier does not say that others use its storage (shared)")
