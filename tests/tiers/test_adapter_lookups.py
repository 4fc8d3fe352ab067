"""How the adapter asks a tier about many keys: in parts, as far as needed, and what was told when the time is up."""

import time
from collections.abc import Sequence

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.work import Pace
from kvtier_core.values import JobResult, TierInfo
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.rows import similar_keys
from tests.tiers.scripted import Clock, Gate, Script, drive, fail, row

ASKED = TierInfo(medium="memory", persistent=True, shared=True, bounded_by="tier")
KEYS = similar_keys(1024)


def keys_asked(script: Script) -> list[OffloadKey]:
    return [key for method, keys in script.calls if method == "contains" for key in keys]


def told_by(result: JobResult) -> list[bool | None]:
    assert result.present is not None
    return list(result.present)


def holding(present: int) -> dict[OffloadKey, bytes]:
    return {key: row(0) for key in KEYS[:present]}


class SlowStorage(Clock):
    """One that takes so long for each key, one after the other."""

    def __init__(self, seconds_a_key: float) -> None:
        super().__init__()
        self._seconds_a_key = seconds_a_key

    def before(self, method: str, keys: Sequence[OffloadKey]) -> None:
        if method == "contains":
            self.now += self._seconds_a_key * len(keys)


@pytest.mark.parametrize("present", [0, 3, 100, 700])
def test_b6_calls_stop_soon_after_the_first_key_of_a_prefix_that_is_not_there(present):
    script, clock = Script(), SlowStorage(0.010)
    script.before = clock.before
    with drive(script, info=ASKED, seed=holding(present), threads=4, monotonic=clock) as tier:
        told = told_by(tier.wait(tier.start_lookup(KEYS, is_prefix=True)))
    assert told[: present + 1] == [True] * present + [False]
    assert len(keys_asked(script)) <= present + 40
    assert set(keys_asked(script)) == set(KEYS[: len(keys_asked(script))])


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("is_prefix", [True, False])
def test_b6_s2_a_storage_of_10_ms_a_key_tells_what_it_can_in_the_time_there_is(threads, is_prefix):
    script, clock = Script(), SlowStorage(0.010)
    script.before = clock.before
    with drive(script, info=ASKED, seed=holding(700), threads=threads, monotonic=clock) as tier:
        lookup = tier.start_lookup(KEYS, deadline=clock.now + 2.0, is_prefix=is_prefix)
        result = tier.wait(lookup)
    assert result.error is None
    told = told_by(result)
    assert 150 <= told.index(None) <= 200, (
        "the clock stands still between calls, so that threads gain nothing"
    )
    assert set(told[: told.index(None)]) == {True}
    assert False not in told


@pytest.mark.parametrize("is_prefix", [True, False])
def test_s2_a_part_that_hangs_costs_no_other_part(is_prefix):
    script, clock = Script(), Clock()
    keys = KEYS[:60]
    script.before = gate = Gate("contains", keys=keys[8:9])
    with drive(script, info=ASKED, seed=holding(60), threads=2, monotonic=clock) as tier, gate:
        lookup = tier.start_lookup(keys, deadline=clock.now + 2.0, is_prefix=is_prefix)
        gate.wait_entered()
        (held,) = [set(asked) for method, asked in script.calls if keys[8] in asked]
        give_up = time.monotonic() + PATIENCE_S
        while len(keys_asked(script)) < len(keys):
            assert time.monotonic() < give_up, "what hangs keeps others from being asked about"
            time.sleep(0.001)
        assert tier.unanswered() == {lookup}
        clock.now += 1.9
        told = dict(zip(keys, told_by(tier.wait(lookup)), strict=True))
        assert all(told[key] is None for key in held)
        assert list(told.values()).count(True) >= 16
        assert False not in told.values()
        gate.open()
        assert tier.lookup(keys) == [True] * 60


def test_s2_a_lookup_of_which_nothing_was_told_is_not_answered():
    script, clock = Script(), Clock()
    script.before = gate = Gate("contains")
    with drive(script, info=ASKED, seed=holding(8), threads=1, monotonic=clock) as tier, gate:
        lookup = tier.start_lookup(KEYS[:8], deadline=clock.now + 2.0, is_prefix=True)
        gate.wait_entered()
        clock.now += 5.0
        assert tier.unanswered() == {lookup}
        gate.open()
        assert True in told_by(tier.wait(lookup))


def test_s2_a_call_that_fails_costs_no_other_call_its_answers():
    script = Script()
    keys = KEYS[:60]
    script.before = lambda _method, asked: fail(OSError("reset")) if keys[20] in asked else None
    with drive(script, info=ASKED, seed=holding(60), threads=1) as tier:
        result = tier.wait(tier.start_lookup(keys))
    assert keys[20] in result.failed
    told = dict(zip(keys, told_by(result), strict=True))
    assert all(told[key] is (None if key in result.failed else True) for key in keys)
    assert len(result.failed) < 60
    assert "OSError: reset" in str(result.error)


def test_s2_a_key_that_could_not_be_asked_about_costs_no_other_of_its_call():
    script = Script()

    def contains(method: str, asked: Sequence[OffloadKey]) -> list[bool | Exception] | None:
        if method != "contains":
            return None
        return [OSError("reset") if key == KEYS[2] else key in script.blocks for key in asked]

    script.before = contains
    with drive(script, info=ASKED, seed=holding(3)) as tier:
        result = tier.wait(tier.start_lookup(KEYS[:4]))
    assert (result.present, result.failed) == ((True, True, None, False), (KEYS[2],))


def test_s2_a_tier_that_was_shut_down_asks_no_further():
    script = Script()
    script.before = gate = Gate("contains")
    with drive(script, info=ASKED, seed=holding(1024), threads=1) as tier, gate:
        lookup = tier.start_lookup(KEYS, is_prefix=True)
        gate.wait_entered()
        tier.shutdown(timeout_s=0.0)
        gate.open()
        assert tier.wait(lookup).failed
    assert len(keys_asked(script)) < 1024


def pace_after(calls: int, seconds: float, at_once: int) -> int:
    """How many keys a call asks about where so many take so long together."""
    pace = Pace()
    for _ in range(calls):
        pace.note(pace.keys, seconds * -(-pace.keys // at_once))
    return pace.keys


@pytest.mark.parametrize(
    ("seconds", "at_once", "least", "most"),
    [(0.010, 1, 2, 8), (0.020, 32, 32, 128), (0.200, 32, 32, 64), (0.0001, 1, 256, 256), (1.0, 1, 4, 8)],
)
def test_b6_a_call_asks_about_as_many_keys_as_take_hardly_longer_than_a_few(seconds, at_once, least, most):
    sizes = {pace_after(calls, seconds, at_once) for calls in range(20, 40)}
    assert least <= min(sizes)
    assert max(sizes) <= most


def test_b6_the_size_of_calls_follows_a_storage_that_becomes_slow_and_quick_again():
    pace = Pace()
    for seconds, least, most in ((0.0001, 256, 256), (0.1, 1, 2), (0.0001, 256, 256)):
        for _ in range(40):
            pace.note(pace.keys, seconds * pace.keys)
        assert least <= pace.keys <= most
