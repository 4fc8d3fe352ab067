"""vLLM asks key by key; the coordinator is asked once a step."""

import pytest

from kvtier_core import LookupState, make_offload_key
from kvtier_vllm.order import AskedPrefix

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS


def keys(count, start=0):
    return [make_offload_key(bytes([number]) * 32, 0) for number in range(start, start + count)]


class Asked:
    """Answers with the states given; remembers what was asked."""

    def __init__(self, *states):
        self.states = states
        self.calls = []

    def __call__(self, wanted):
        self.calls.append(list(wanted))
        return self.states[: len(wanted)]


def test_c10_one_lookup_a_step_answers_for_all_keys_of_a_request():
    wanted = keys(4)
    prefix = AskedPrefix(dict.fromkeys(wanted, 0))
    ask = Asked(HIT, HIT, PENDING, MISS)
    assert [prefix.answer(key, 1, ask) for key in wanted] == [HIT, HIT, PENDING, MISS]
    assert ask.calls == [wanted]
    prefix.answer(wanted[0], 2, ask)
    assert ask.calls == [wanted, wanted]


def test_keys_before_the_first_one_asked_are_not_looked_up():
    wanted = keys(4)
    prefix = AskedPrefix(dict.fromkeys(wanted, 0))
    ask = Asked(HIT, HIT)
    assert prefix.answer(wanted[2], 1, ask) is HIT
    assert ask.calls == [wanted[2:]]
    assert prefix.answer(wanted[1], 1, ask) is HIT
    assert ask.calls == [wanted[2:], wanted[1:]]


def test_behind_the_key_that_ended_the_prefix_all_is_a_miss():
    wanted = keys(3)
    prefix = AskedPrefix(dict.fromkeys(wanted, 0))
    ask = Asked(RETRY)
    assert [prefix.answer(key, 1, ask) for key in wanted] == [RETRY, MISS, MISS]
    assert len(ask.calls) == 1


def test_keys_that_vllm_adds_later_are_seen():
    positions = dict.fromkeys(keys(2), 0)
    prefix = AskedPrefix(positions)
    ask = Asked(HIT, HIT, HIT)
    prefix.answer(keys(1)[0], 1, ask)
    positions |= dict.fromkeys(keys(1, start=2), 0)
    assert prefix.answer(keys(1, start=2)[0], 1, ask) is RETRY  # not looked up in this step
    assert prefix.answer(keys(1)[0], 2, ask) is HIT
    assert ask.calls[-1] == keys(3)


def test_a_key_that_is_not_the_requests_is_a_miss():
    prefix = AskedPrefix(dict.fromkeys(keys(2), 0))
    assert prefix.answer(keys(1, start=9)[0], 1, Asked()) is MISS


@pytest.mark.parametrize("count", [1, 5])
def test_without_vllms_map_the_keys_seen_are_looked_up_together_a_step_later(count):
    wanted = keys(count)
    prefix = AskedPrefix(None)
    ask = Asked(*[HIT] * count)
    assert [prefix.answer(key, 1, ask) for key in wanted] == [RETRY] * count
    assert ask.calls == []
    assert [prefix.answer(key, 2, ask) for key in wanted] == [HIT] * count
    assert ask.calls == [wanted]
