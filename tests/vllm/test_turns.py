"""A load is promised only to a request that may load in this step: vLLM stops otherwise (C04)."""

import pytest

from kvtier_core.engine import LookupState
from kvtier_vllm.turns import Turns

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS


def ask(turns, step, *states):
    """Whether it must wait in *step*; if not, it is told *states*."""
    if turns.must_wait(step):
        assert turns.must_wait(step), "all questions of a step have the same answer"
        return True
    for state in states:
        turns.tell(state)
    return False


def has_run(*, is_prefix=True):
    turns = Turns(is_prefix=is_prefix)
    assert not ask(turns, 0, MISS)
    turns.run()
    return turns


def test_a_request_that_has_not_run_never_waits():
    turns = Turns(is_prefix=True)
    assert [ask(turns, step, MISS) for step in (3, 4, 9)] == [False, False, False]


@pytest.mark.parametrize("is_prefix", [True, False])
def test_a_request_that_has_run_waits_one_step(is_prefix):
    turns = has_run(is_prefix=is_prefix)
    assert [ask(turns, step) for step in (5, 6)] == [True, False]


@pytest.mark.parametrize("told", [(RETRY,), (PENDING, MISS), (HIT, HIT), (MISS,)])
@pytest.mark.parametrize("is_prefix", [True, False])
def test_v2_c04_a_request_that_ran_without_asking_waits_whatever_it_was_told_before(is_prefix, told):
    turns = has_run(is_prefix=is_prefix)
    assert ask(turns, 5)
    assert not ask(turns, 6, *told)
    # In step 7 it runs from the device's cache, and does not ask. Then a reset preempts it.
    assert ask(turns, 8)


@pytest.mark.parametrize("told", [(RETRY,), (HIT, PENDING, MISS), (HIT, HIT, MISS)], ids=str)
def test_v2_a_prefix_that_was_pending_or_not_given_room_does_not_wait_again(told):
    turns = has_run()
    assert ask(turns, 5)
    assert [ask(turns, step, *told) for step in (6, 7, 8)] == [False] * 3


@pytest.mark.parametrize("told", [(HIT,), (HIT, MISS), (MISS,)], ids=str)
def test_v2_c04_a_request_that_may_have_run_without_a_load_waits(told):
    turns = has_run()
    assert ask(turns, 5)
    assert not ask(turns, 6, *told)
    assert ask(turns, 7)


def test_v2_c04_a_request_that_has_loaded_waits():
    turns = has_run()
    assert ask(turns, 5)
    assert not ask(turns, 6, HIT, HIT)
    turns.load()
    assert ask(turns, 7)


@pytest.mark.parametrize(
    ("told", "waits"), [((RETRY, RETRY), False), ((PENDING, MISS), True), ((HIT, HIT), True)]
)
def test_v2_c04_of_several_groups_only_a_whole_step_of_waiting_is_certain(told, waits):
    turns = has_run(is_prefix=False)
    assert ask(turns, 5)
    assert not ask(turns, 6, *told)
    assert ask(turns, 7) is waits
