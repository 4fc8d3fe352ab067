"""Tiers that others change too (``SupportsFollow``), that hear of uses (``SupportsTouch``), or choose a class."""

import logging
import threading

import pytest

from kvtier_core.blocktier import BlockTier, SupportsTouch
from kvtier_core.errors import TierOpenError
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import TierInfo
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.rows import RowMaker, similar_keys
from tests.tiers.extents import wait_until
from tests.tiers.held import num_held

MAKER = RowMaker("kit-namespace", 5000)
A, B, C, D = KEYS = similar_keys(4)


class Followed(BlockTier):
    """Holds what ``others`` put there; says so when it is asked to follow."""

    info = TierInfo(medium="memory", persistent=True, bounded_by="tier")
    follow_interval = 0.01

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.others_stored, self.others_removed = [A], []
        self.fails = 0
        self.followed_by: list[str] = []
        self.touched: list[bytes] = []
        self.batches: list[int] = []
        self.closed = threading.Event()
        self.may_load = threading.Event()
        self.may_load.set()

    def open(self):
        pass

    def contains(self, keys):
        raise AssertionError("it is never asked what it has said")

    def store(self, key, block):
        raise AssertionError("it takes batches")

    def load(self, key, into):
        raise AssertionError("it takes batches")

    def store_many(self, keys, blocks):
        self.batches.append(len(keys))
        return [True] * len(keys)

    def load_many(self, keys, intos):
        assert self.may_load.wait(PATIENCE_S)
        return [True] * len(keys)

    def delete(self, keys):
        pass

    def close(self):
        self.closed.set()

    def follow(self):
        self.followed_by.append(threading.current_thread().name)
        if self.fails:
            self.fails -= 1
            raise OSError("out of sight")
        stored, self.others_stored = self.others_stored, []
        removed, self.others_removed = self.others_removed, []
        self.context.report_stored(stored)
        self.context.report_evicted(removed)

    def touch(self, keys):
        self.touched += keys


class Shared(Followed):
    """Of others as well, which tell all they do."""

    info = TierInfo(medium="remote", persistent=True, shared=True, bounded_by="tier", reports_contents=True)


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.work.MAX_BATCH_BYTES", MAKER.row_bytes)
    settings = TierSettings(type="x", threads=1)
    with TierDriver(Followed, settings, row_bytes=MAKER.row_bytes) as opened:
        yield opened


def tier_of(driver) -> Followed:
    tier: Followed = driver.backend.port._instance()._tier
    assert issubclass(Followed, SupportsTouch)
    return tier


def test_c10_what_a_followed_tier_holds_is_known_when_it_is_open_and_absence_is_too(driver):
    assert driver.lookup([A, B]) == [True, False]
    assert driver.load([B]).result.missing == (B,)
    assert num_held(driver) == 1


def test_c55_a_shared_tier_that_tells_all_that_changes_is_not_asked():
    with TierDriver(Shared, TierSettings(type="x", threads=1), row_bytes=MAKER.row_bytes) as driver:
        assert driver.resident() is not None
        assert driver.lookup([A, B]) == [True, False]
        tier_of(driver).others_stored = [B]
        wait_until(lambda: driver.lookup([A, B]) == [True, True], "the new block is known")


def test_k7_o2_c16_changes_by_others_are_known_and_told_once(driver):
    tier = tier_of(driver)
    driver.take_events()
    tier.others_stored = [A, B]
    wait_until(lambda: driver.lookup([B]) == [True], "the new block is known")
    tier.others_removed = [A]
    wait_until(lambda: driver.lookup([A]) == [False], "the removed block is known")
    events = [(event.kind, tuple(event.keys)) for event in driver.take_events()]
    assert events == [("stored", (B,)), ("removed", (A,))]


def test_c30_a_follow_that_fails_is_logged_once_and_tried_again(driver, caplog):
    tier = tier_of(driver)
    tier.fails = 5
    tier.others_stored = [C]
    wait_until(lambda: driver.lookup([C]) == [True], "it was tried again")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "out of sight" in warnings[0]
    assert "may have changed unnoticed" in warnings[0]


@pytest.mark.parametrize("answer", [False, OSError("unreadable")])
def test_c10_what_is_reported_while_a_load_finds_it_gone_is_there(driver, monkeypatch, answer):
    tier = tier_of(driver)

    def load_many(keys, intos):
        tier.context.report_evicted(keys)
        tier.context.report_stored(keys)  # in another place, after this load had looked
        return [answer] * len(keys)

    with monkeypatch.context() as patched:
        patched.setattr(tier, "load_many", load_many)
        assert not driver.load([A]).rows
    assert driver.lookup([A]) == [True]
    assert A in driver.load([A]).rows


def test_c10_what_a_load_finds_gone_is_gone_whatever_was_reported_before(driver, monkeypatch):
    tier = tier_of(driver)

    def load_many(keys, intos):
        tier.context.report_stored(keys)
        tier.context.report_evicted(keys)
        return [False] * len(keys)

    monkeypatch.setattr(tier, "load_many", load_many)
    assert not driver.load([A]).rows
    assert driver.lookup([A]) == [False]


def test_following_has_a_thread_of_its_own_that_ends_with_the_tier(driver):
    tier = tier_of(driver)
    wait_until(lambda: len(tier.followed_by) > 3, "it was followed")
    assert tier.followed_by[0] == "kvtier-kit", "the thread that opened it"
    assert {*tier.followed_by[1:]} == {"kvtier-kit-follow"}
    driver.shutdown()
    assert tier.closed.wait(PATIENCE_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-kit-follow"]


def test_uses_are_handed_on_to_a_tier_that_bounds_itself(driver):
    driver.touch([A, B])
    assert tier_of(driver).touched == [A, B]


class Chooses(Followed):
    @classmethod
    def for_settings(cls, settings):
        return Followed if settings.threads == 1 else cls


def test_a_type_may_choose_its_class_by_its_settings():
    assert BlockTier.for_settings(TierSettings(type="x")) is BlockTier
    assert Chooses.for_settings(TierSettings(type="x", threads=1)) is Followed
    assert Chooses.for_settings(TierSettings(type="x", threads=2)) is Chooses


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), "5s", None, True])
def test_c30_a_tier_that_is_to_be_followed_at_no_sensible_times_can_not_open(interval):
    closed = threading.Event()

    class Restless(Followed):
        follow_interval = interval

        def close(self):
            closed.set()

    with pytest.raises(TierOpenError, match="follow_interval must be a number of seconds above 0"):
        TierDriver(Restless, TierSettings(type="x"), row_bytes=MAKER.row_bytes)
    assert closed.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-kit-")]


def test_c30_one_that_is_hardly_ever_to_be_followed_ends_like_any_other():
    class Quiet(Followed):
        follow_interval = float("inf")

    with TierDriver(Quiet, TierSettings(type="x"), row_bytes=MAKER.row_bytes) as opened:
        tier = opened.backend.port._instance()._tier
    assert tier.closed.wait(PATIENCE_S)
