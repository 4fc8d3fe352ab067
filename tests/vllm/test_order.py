"""vLLM asks key by key; the coordinator is asked once a step."""

from dataclasses import dataclass

import pytest

from kvtier_core import LookupState, make_offload_key
from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_vllm.order import AskedGroups, AskedPrefix

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS


def keys(count, start=0, group=0):
    return [make_offload_key(bytes([number]) * 32, group) for number in range(start, start + count)]


class Asked:
    """Answers with the states given; remembers what was asked."""

    def __init__(self, *states):
        self.states = states
        self.calls = []
        self.tuples = []

    def __call__(self, wanted):
        self.calls.append(list(wanted))
        self.tuples.append(wanted)
        return self.states[: len(wanted)]


def test_c10_one_lookup_a_step_answers_for_all_keys_of_a_request():
    wanted = keys(4)
    ask = Asked(HIT, HIT, PENDING, MISS)
    prefix = AskedPrefix(dict.fromkeys(wanted, 0), ask)
    assert [prefix.answer(key, 1) for key in wanted] == [HIT, HIT, PENDING, MISS]
    assert ask.calls == [wanted]
    prefix.answer(wanted[0], 2)
    assert ask.calls == [wanted, wanted]


def test_keys_before_the_first_one_asked_are_not_looked_up():
    wanted = keys(4)
    ask = Asked(HIT, HIT)
    prefix = AskedPrefix(dict.fromkeys(wanted, 0), ask)
    assert prefix.answer(wanted[2], 1) is HIT
    assert ask.calls == [wanted[2:]]
    assert prefix.answer(wanted[1], 1) is HIT
    assert ask.calls == [wanted[2:], wanted[1:]]


def test_behind_the_key_that_ended_the_prefix_all_is_a_miss():
    wanted = keys(3)
    ask = Asked(RETRY)
    prefix = AskedPrefix(dict.fromkeys(wanted, 0), ask)
    assert [prefix.answer(key, 1) for key in wanted] == [RETRY, MISS, MISS]
    assert len(ask.calls) == 1


def test_keys_that_vllm_adds_later_are_seen():
    positions = dict.fromkeys(keys(2), 0)
    ask = Asked(HIT, HIT, HIT)
    prefix = AskedPrefix(positions, ask)
    prefix.answer(keys(1)[0], 1)
    positions |= dict.fromkeys(keys(1, start=2), 0)
    assert prefix.answer(keys(1, start=2)[0], 1) is RETRY  # not looked up in this step
    assert prefix.answer(keys(1)[0], 2) is HIT
    assert ask.calls[-1] == keys(3)


def test_a_key_that_is_not_the_requests_is_a_miss():
    prefix = AskedPrefix(dict.fromkeys(keys(2), 0), Asked())
    assert prefix.answer(keys(1, start=9)[0], 1) is MISS


@pytest.mark.parametrize("count", [1, 5])
def test_without_vllms_map_the_keys_seen_are_looked_up_together_a_step_later(count):
    wanted = keys(count)
    ask = Asked(*[HIT] * count)
    prefix = AskedPrefix(None, ask)
    assert [prefix.answer(key, 1) for key in wanted] == [RETRY] * count
    assert ask.calls == []
    assert [prefix.answer(key, 2) for key in wanted] == [HIT] * count
    assert ask.calls == [wanted]


def test_a_request_that_waits_asks_with_the_same_tuple_again():
    wanted = keys(3)
    ask = Asked(HIT, RETRY)
    prefix = AskedPrefix(dict.fromkeys(wanted, 0), ask)
    for step in (1, 2):
        prefix.answer(wanted[0], step)
    assert ask.tuples[0] is ask.tuples[1]


@dataclass(frozen=True)
class End:
    tokens: int
    is_settled: bool


BLOCK = 32
FULL, WINDOW = GroupShape(BLOCK), GroupShape(BLOCK, 2 * BLOCK)


class AskedEnd:
    """Answers with the end point given; remembers what was asked."""

    def __init__(self, tokens, *, settled=True):
        self.end = End(tokens, settled)
        self.calls = []

    def __call__(self, wanted, limit):
        self.calls.append((wanted, limit))
        return self.end


def two_groups(count, ask):
    """Group 0 sees everything, group 3 a window of two blocks; vLLM adds keys group by group, now and then."""
    full, window = keys(count), keys(count, group=3)
    half = count // 2
    positions = dict.fromkeys([*full[:half], *window[:half], *full[half:], *window[half:]], 0)
    return full, window, AskedGroups(positions, [0, 3], [FULL, WINDOW], ask)


def test_k12_all_groups_hit_just_what_their_common_end_needs():
    ask = AskedEnd(3 * BLOCK)
    full, window, asked = two_groups(4, ask)
    assert [asked.answer(key, 1) for key in full] == [HIT, HIT, HIT, MISS]
    assert [asked.answer(key, 1) for key in reversed(window)] == [MISS, HIT, HIT, MISS]
    assert ask.calls == [((tuple(full), tuple(window)), 4 * BLOCK)]


def test_groups_begin_where_the_device_ends():
    ask = AskedEnd(2 * BLOCK)
    full, window, asked = two_groups(4, ask)
    assert [asked.answer(key, 1) for key in full[2:]] == [HIT, HIT]
    assert [asked.answer(key, 1) for key in reversed(window[2:])] == [HIT, HIT]
    assert ask.calls == [((tuple(full[2:]), tuple(window[2:])), 2 * BLOCK)]


@pytest.mark.parametrize(("end", "says"), [(AskedEnd(0), MISS), (AskedEnd(0, settled=False), RETRY)])
def test_groups_without_an_end_miss_once_that_is_certain(end, says):
    full, window, asked = two_groups(2, end)
    assert {asked.answer(key, 1) for key in (*full, *window)} == {says}


def test_groups_wait_for_an_end_that_is_hoped_for():
    full, _, asked = two_groups(2, AskedEnd(BLOCK, settled=False))
    assert [asked.answer(key, 1) for key in full] == [PENDING, MISS]


def test_windows_alone_are_asked_for_from_their_end_in_one_lookup():
    window = keys(4)
    ask = AskedEnd(4 * BLOCK)
    asked = AskedGroups(dict.fromkeys(window, 0), [0], [WINDOW], ask)
    assert [asked.answer(key, 1) for key in reversed(window)] == [HIT, HIT, MISS, MISS]
    assert len(ask.calls) == 1


def test_groups_are_not_served_without_vllms_map():
    asked = AskedGroups(None, [0], [WINDOW], AskedEnd(BLOCK))
    assert asked.answer(keys(1)[0], 1) is MISS
