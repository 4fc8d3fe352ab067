"""vLLM asks key by key; the coordinator is asked once a step."""

from dataclasses import dataclass

import pytest

from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.engine import LookupState, make_offload_key
from kvtier_vllm.order import Asked

HIT, PENDING, RETRY, MISS = LookupState.HIT, LookupState.HIT_PENDING, LookupState.RETRY, LookupState.MISS


def keys(count, start=0, group=0):
    return [make_offload_key(bytes([number]) * 32, group) for number in range(start, start + count)]


@dataclass(frozen=True)
class Found:
    tokens: int
    state: LookupState


class Ask:
    """Answers with an end point at this many blocks; remembers what was asked."""

    def __init__(self, blocks, state=HIT):
        self.found = Found(blocks * BLOCK, state)
        self.calls = []

    def __call__(self, wanted):
        self.calls.append(wanted)
        return self.found


BLOCK = 32
FULL, WINDOW = GroupShape(BLOCK), GroupShape(BLOCK, 2 * BLOCK)


def prefix_of(positions, ask):
    return Asked(positions, [0], [FULL], ask)


@pytest.mark.parametrize(
    ("state", "says"), [(HIT, HIT), (MISS, HIT), (PENDING, PENDING), (RETRY, RETRY)], ids=str
)
def test_c10_one_lookup_a_step_answers_for_all_keys_of_a_request(state, says):
    wanted = keys(4)
    ask = Ask(3, state)
    asked = prefix_of(dict.fromkeys(wanted, 0), ask)
    assert [asked.answer(key, 1) for key in wanted] == [says, says, says, MISS]
    assert ask.calls == [(tuple(wanted),)]
    asked.answer(wanted[0], 2)
    assert len(ask.calls) == 2


def test_keys_before_the_first_one_asked_are_not_looked_up():
    wanted = keys(4)
    ask = Ask(2)
    asked = prefix_of(dict.fromkeys(wanted, 0), ask)
    assert asked.answer(wanted[2], 1) is HIT
    assert ask.calls == [(tuple(wanted[2:]),)]
    assert asked.answer(wanted[1], 1) is HIT
    assert ask.calls[1:] == [(tuple(wanted[1:]),)]


def test_keys_that_vllm_adds_later_are_seen():
    positions = dict.fromkeys(keys(2), 0)
    ask = Ask(3)
    asked = prefix_of(positions, ask)
    asked.answer(keys(1)[0], 1)
    ask.found = Found(2 * BLOCK, HIT)
    positions |= dict.fromkeys(keys(1, start=2), 0)
    assert asked.answer(keys(2)[1], 1) is HIT
    ask.found = Found(3 * BLOCK, HIT)
    assert asked.answer(keys(1)[0], 2) is HIT
    assert ask.calls[-1] == (tuple(keys(3)),)


def test_a_key_that_was_added_since_the_lookup_is_asked_for_again():
    positions = dict.fromkeys(keys(2), 0)
    asked = prefix_of(positions, Ask(2))
    asked.answer(keys(1)[0], 1)
    positions |= dict.fromkeys(keys(1, start=2), 0)
    assert asked.answer(keys(1, start=2)[0], 1) is RETRY


def test_a_key_that_is_not_the_requests_is_a_miss():
    assert prefix_of(dict.fromkeys(keys(2), 0), Ask(2)).answer(keys(1, start=9)[0], 1) is MISS


@pytest.mark.parametrize("count", [1, 5])
def test_without_vllms_map_the_keys_seen_are_looked_up_together_a_step_later(count):
    wanted = keys(count)
    ask = Ask(count)
    asked = prefix_of(None, ask)
    assert [asked.answer(key, 1) for key in wanted] == [RETRY] * count
    assert ask.calls == []
    assert [asked.answer(key, 2) for key in wanted] == [HIT] * count
    assert ask.calls == [(tuple(wanted),)]


def test_a_request_that_waits_asks_with_the_same_tuple_again():
    wanted = keys(3)
    ask = Ask(2, RETRY)
    asked = prefix_of(dict.fromkeys(wanted, 0), ask)
    for step in (1, 2):
        asked.answer(wanted[0], step)
    assert ask.calls[0] is ask.calls[1]


def two_groups(count, ask):
    """Group 0 sees everything, group 3 a window of two blocks; vLLM adds keys group by group, now and then."""
    full, window = keys(count), keys(count, group=3)
    half = count // 2
    positions = dict.fromkeys([*full[:half], *window[:half], *full[half:], *window[half:]], 0)
    return full, window, Asked(positions, [0, 3], [FULL, WINDOW], ask)


def test_k12_all_groups_hit_just_what_their_common_end_needs():
    ask = Ask(3)
    full, window, asked = two_groups(4, ask)
    assert [asked.answer(key, 1) for key in full] == [HIT, HIT, HIT, MISS]
    assert [asked.answer(key, 1) for key in reversed(window)] == [MISS, HIT, HIT, MISS]
    assert ask.calls == [(tuple(full), tuple(window))]


def test_groups_begin_where_the_device_ends():
    ask = Ask(2)
    full, window, asked = two_groups(4, ask)
    assert [asked.answer(key, 1) for key in full[2:]] == [HIT, HIT]
    assert [asked.answer(key, 1) for key in reversed(window[2:])] == [HIT, HIT]
    assert ask.calls == [(tuple(full[2:]), tuple(window[2:]))]


def test_groups_without_an_end_miss():
    full, window, asked = two_groups(2, Ask(0, MISS))
    assert {asked.answer(key, 1) for key in (*full, *window)} == {MISS}


def test_groups_wait_for_an_end_that_is_hoped_for():
    full, _, asked = two_groups(2, Ask(1, PENDING))
    assert [asked.answer(key, 1) for key in full] == [PENDING, MISS]


def test_a_key_of_one_group_waits_until_the_other_groups_reach_it():
    positions = dict.fromkeys([*keys(2), *keys(2, group=3)], 0)
    asked = Asked(positions, [0, 3], [FULL, FULL], Ask(2))
    asked.answer(keys(1)[0], 1)
    positions |= dict.fromkeys(keys(3), 0)
    assert asked.answer(keys(3)[2], 1) is MISS


def test_with_one_shape_the_keys_of_all_groups_are_one_prefix_in_the_order_asked():
    wanted = [*keys(2), *keys(2, group=3)]
    ask = Ask(3)
    asked = Asked(dict.fromkeys(wanted, 0), [0, 3], [FULL], ask)
    assert [asked.answer(key, 1) for key in wanted] == [HIT, HIT, HIT, MISS]
    assert ask.calls == [(tuple(wanted),)]


def test_windows_alone_are_asked_for_from_their_end_in_one_lookup():
    window = keys(4)
    ask = Ask(4)
    asked = Asked(dict.fromkeys(window, 0), [0], [WINDOW], ask)
    assert [asked.answer(key, 1) for key in reversed(window)] == [HIT, HIT, MISS, MISS]
    assert len(ask.calls) == 1


STATE, WIDE = GroupShape(BLOCK, 1), GroupShape(2 * BLOCK, 2 * BLOCK)


class AskAll:
    """Finds every block that it is asked about."""

    def __init__(self):
        self.calls = []

    def __call__(self, wanted):
        self.calls.append(wanted)
        return Found(len(wanted[0]) * BLOCK, HIT)


def beside_full(count, other, shape, ask):
    """Group 0 sees everything in *count* blocks, group 3 has *other* blocks of this shape."""
    full, others = keys(count), keys(other, group=3)
    positions = {key: (index + 1) * BLOCK for index, key in enumerate(full)}
    positions |= {key: (index + 1) * shape.tokens_per_block for index, key in enumerate(others)}
    return full, others, positions, Asked(positions, [0, 3], [FULL, shape], ask)


def test_i17_groups_with_blocks_of_different_sizes_hit_up_to_one_token():
    ask = Ask(4)
    full, wide, _, asked = beside_full(7, 3, WIDE, ask)
    assert [asked.answer(key, 1) for key in full] == [HIT] * 4 + [MISS] * 3
    assert [asked.answer(key, 1) for key in reversed(wide)] == [MISS, HIT, MISS]
    assert ask.calls == [(tuple(full[:6]), tuple(wide))]


def test_i17_a_lookup_of_different_sizes_begins_at_a_block_of_each():
    ask = Ask(2)
    full, wide, _, asked = beside_full(6, 3, WIDE, ask)
    assert [asked.answer(key, 1) for key in full[2:5]] == [HIT, HIT, MISS]
    assert [asked.answer(key, 1) for key in reversed(wide[1:])] == [MISS, HIT]
    assert ask.calls == [(tuple(full[2:]), tuple(wide[1:]))]


def test_i17_an_end_beyond_what_vllm_may_load_is_looked_for_again():
    ask = AskAll()
    full, states, _, asked = beside_full(4, 4, STATE, ask)
    for step in (1, 2):
        assert [asked.answer(key, step) for key in full[:3]] == [HIT] * 3
        assert [asked.answer(key, step) for key in reversed(states[:3])] == [HIT, MISS, MISS]
    assert ask.calls[:2] == [(tuple(full), tuple(states)), (tuple(full[:3]), tuple(states[:3]))]
    assert len(ask.calls) == 3  # the second step knows
    assert ask.calls[2] is ask.calls[1]


def test_i17_states_alone_are_asked_for_from_where_vllm_may_load():
    states = keys(4)
    ask = AskAll()
    asked = Asked({key: (index + 1) * BLOCK for index, key in enumerate(states)}, [0], [STATE], ask)
    assert [asked.answer(key, 1) for key in reversed(states[:3])] == [HIT, MISS, MISS]


def test_i17_keys_within_a_block_are_misses_and_move_no_other():
    ask = AskAll()
    full, _, positions, asked = beside_full(3, 3, STATE, ask)
    tails = [*keys(1, start=70), *keys(1, start=71, group=3)]
    positions |= dict.fromkeys(tails, 3 * BLOCK + 8)
    positions |= dict.fromkeys((*keys(1, start=3), *keys(1, start=3, group=3)), 4 * BLOCK)
    assert [asked.answer(key, 1) for key in (*full, *tails)] == [HIT] * 3 + [MISS] * 2
    assert asked.answer(keys(1, start=3, group=3)[0], 1) is HIT
    assert ask.calls == [(tuple(keys(4)), tuple(keys(4, group=3)))]
