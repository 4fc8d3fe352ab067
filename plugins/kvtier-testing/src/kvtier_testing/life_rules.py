"""The lives of a tier: constructor, restarts, resets, shutdown, and what is left when it is over."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from kvtier_core.errors import TierOpenError
from kvtier_core.values import TierContext, TierInfo
from kvtier_testing.calling import CallThread
from kvtier_testing.checks import assert_contents, assert_moved, make_rows
from kvtier_testing.driving import TierDriver
from kvtier_testing.fixtures import OpenTier, Spaces, TierFixtures
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.rules import rule
from kvtier_testing.watching import resources, watch_io

_CYCLES = 3
"""Times that a tier is opened and closed: what each of them leaves is a leak, what only the first leaves is not."""


_LOOK_S = 0.05


class LifeRules(TierFixtures):
    """Restarts, resets and shutdown."""

    @pytest.fixture
    def construct(
        self, tier_class: type[Any], tier_settings: Mapping[str, object], maker: RowMaker
    ) -> Callable[[CallThread], Any]:
        """Calls the constructor, and nothing else, on a thread of its own."""
        settings = tier_class.Settings.model_validate({"type": "kit", **tier_settings})
        context = TierContext(name="kit", namespace=maker.namespace, row_bytes=maker.row_bytes)
        return lambda thread: thread.call("the constructor", lambda: tier_class(settings, context))

    @rule
    def test_c52_the_constructor_does_no_io(
        self, construct: Callable[[CallThread], Any], info: TierInfo
    ) -> None:
        """A constructor opens nothing: what may fail or take its time belongs to ``open``, which is tried again.

        Move what connects, makes directories or writes files to ``open`` or ``on_open``.
        """
        del info  # asked for, because it checks the class
        thread = CallThread(self.patience_s)
        construct(thread)  # imports what it needs
        with watch_io() as seen:
            construct(thread)
        assert not seen, f"the constructor did I/O: {', '.join(sorted(seen))}"

    @rule
    def test_c34_a_tier_that_was_never_opened_can_be_closed(
        self, construct: Callable[[CallThread], Any], info: TierInfo
    ) -> None:
        """``close`` or ``shutdown`` comes after an open that failed as well, at whatever line it failed.

        Set in the constructor what they look at, such as ``self.client = None``.
        """
        del info
        thread = CallThread(self.patience_s)
        tier = construct(thread)
        for _ in range(2):
            if hasattr(tier, "close"):
                thread.call("close", tier.close)
            elif hasattr(tier, "shutdown"):
                thread.call("shutdown", partial(tier.shutdown, timeout_s=self.patience_s))

    @rule
    def test_c33_a_tier_that_cannot_open_says_so(
        self, open_tier: OpenTier, unusable_settings: Mapping[str, object] | None
    ) -> None:
        """A tier that can't work as configured raises ``TierOpenError``, which says what to do.

        Raise it from ``open``, in place of the client's own exception, and within the client's timeout.
        """
        if unusable_settings is None:
            pytest.skip("define the fixture unusable_settings: settings with which this tier can't open")
        error: TierOpenError | None = None
        try:
            open_tier(**unusable_settings)
        except TierOpenError as raised:
            error = raised
        assert error is not None, "open returned, though with unusable_settings it can't work"
        assert error.is_explained, f"open raised what only its author understands: {error}"

    @rule
    def test_c34_what_was_opened_is_closed(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """A tier that is closed has no connection, no file and no thread any more.

        Close them in ``close`` or ``shutdown``; do not leave it to the garbage collector.
        """

        def live() -> TierDriver:
            tier = open_tier()
            assert_moved(tier.store(make_rows(maker, similar_keys(2))))
            assert tier.shutdown(), f"close or shutdown did not return within {self.patience_s:g} s"
            return tier

        closed = [live()]
        before = resources()
        closed += [live() for _ in range(_CYCLES)]  # kept, so that the garbage collector closes nothing
        give_up = time.monotonic() + self.patience_s
        while (left := resources() - before) and max(left.values()) >= _CYCLES and time.monotonic() < give_up:
            time.sleep(_LOOK_S)  # a server in this process may close its end of a connection a little later
        leaks = [what for what, count in left.items() if count >= _CYCLES]
        assert not leaks, (
            f"opened and closed {_CYCLES} times, the tier left {_CYCLES} of each: {', '.join(leaks)}"
        )

    @rule
    def test_c32_a_persistent_tier_has_its_blocks_after_a_restart(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo
    ) -> None:
        """A new instance on the same storage serves the blocks that were stored, and may store them again.

        Find them again in ``open`` or ``scan``; if they can't outlive a process, leave out ``persistent``.
        """
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

    @rule
    def test_c02_namespaces_are_apart(self, open_tier: OpenTier, maker: RowMaker, spaces: Spaces) -> None:
        """One key in two namespaces is two blocks.

        Make ``context.namespace`` part of every name.
        """
        other_maker = RowMaker(spaces("other"), self.payload_bytes)
        keys = similar_keys(4)
        one, other = open_tier(), open_tier(namespace=other_maker.namespace)
        assert_moved(one.store(make_rows(maker, keys[:3])))
        assert_contents(other, {}, absent=keys)
        assert_moved(other.store(make_rows(other_maker, keys[1:])))
        assert_contents(one, make_rows(maker, keys[:3]), absent=keys[3:])
        assert_contents(other, make_rows(other_maker, keys[1:]), absent=keys[:1])

    @rule
    def test_c02_instances_without_storage_share_nothing(
        self, open_tier: OpenTier, maker: RowMaker, info: TierInfo, spaces: Spaces
    ) -> None:
        """Two instances of a tier without storage behind it are two tiers.

        Keep blocks in the instance, not in the class or module.
        """
        if info.persistent or info.shared:
            pytest.skip("instances of this tier meet in their storage")
        one, other = open_tier(), open_tier()
        rows = make_rows(maker, similar_keys(2))
        assert_moved(one.store(rows))
        assert_contents(other, {}, absent=list(rows))
        other.reset(spaces("reset"))
        other.shutdown()
        assert_contents(one, rows)

    @rule
    def test_c34_after_a_reset_everything_misses(
        self, open_tier: OpenTier, maker: RowMaker, spaces: Spaces
    ) -> None:
        """After a reset no block of before it is found, not even one whose store was under way.

        Let a job keep the namespace that it was submitted under.
        """
        tier = open_tier()
        keys = similar_keys(20)
        assert_moved(tier.store(make_rows(maker, keys[:10])))
        in_flight = tier.start_store(make_rows(maker, keys[10:]))
        tier.reset(spaces("reset"))
        assert_contents(tier, {}, absent=keys)
        tier.wait(in_flight)
        assert_contents(tier, {}, absent=keys)
        new_rows = make_rows(RowMaker(spaces("reset"), self.payload_bytes), keys[5:15])
        assert_moved(tier.store(new_rows))
        assert_contents(tier, new_rows, absent=keys[:5] + keys[15:])
        tier.reset(spaces("reset-again"))
        assert_contents(tier, {}, absent=keys)

    @rule
    def test_c34_a_reset_leaves_other_namespaces_alone(
        self, open_tier: OpenTier, maker: RowMaker, spaces: Spaces
    ) -> None:
        """A reset ends one namespace. Engines that use another one keep their blocks.

        Serve the new namespace and delete nothing, or delete by the old namespace's own names; never flush a server.
        """
        other_maker = RowMaker(spaces("other"), self.payload_bytes)
        keys = similar_keys(4)
        one, other = open_tier(), open_tier(namespace=other_maker.namespace)
        rows = make_rows(other_maker, keys)
        assert_moved(other.store(rows))
        assert_moved(one.store(make_rows(maker, keys)))
        one.reset(spaces("reset"))
        one.shutdown()
        assert_contents(other, rows)

    @rule
    def test_c34_shutdown_twice_answers_every_job(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """Each job has its result by the end of a shutdown. Afterwards nothing touches a row.

        Fail what has not begun, wait for what has, and let a second shutdown do nothing.
        """
        tier = open_tier()
        rows = make_rows(maker, similar_keys(20))
        jobs = [tier.start_store({key: row}) for key, row in rows.items()]
        assert tier.shutdown(), f"close or shutdown did not return within {self.patience_s:g} s"
        for job in jobs:
            tier.wait(job)
        assert tier.shutdown(), "the second close or shutdown did not return"
        assert not tier.unanswered(), f"jobs without a result: {sorted(tier.unanswered())}"
        assert not tier.drain(0.0), "drain_jobs names jobs after the shutdown"

    @rule
    def test_c31_drain_names_no_job_that_has_ended(self, open_tier: OpenTier, maker: RowMaker) -> None:
        """``drain_jobs`` waits for jobs, and names those that may still touch the pool.

        Take a job off the list when its result is out.
        """
        tier = open_tier()
        if not tier.has("drain_jobs"):
            pytest.skip("this tier has no drain_jobs hook: its shutdown waits for its jobs")
        job = tier.start_store(make_rows(maker, similar_keys(10)))
        assert not tier.drain(self.patience_s), "drain_jobs names jobs although they had time to end"
        assert_moved(tier.wait(job))
