"""LRU, and what every policy must do whatever its order."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.errors import ConfigError
from kvtier_core.policies import LRU, EvictionPolicy, make_policy


def make(*keys: str) -> EvictionPolicy[str]:
    policy: EvictionPolicy[str] = make_policy("lru", 100)
    for key in keys:
        policy.insert(key)
    return policy


def test_c14_the_longest_unused_leaves_first():
    policy = make("a", "b", "c")
    policy.touch("a")
    assert policy.victims(3, ()) == ["b", "c", "a"]
    assert policy.victims(2, ()) == ["b", "c"]
    assert policy.victims(0, ()) == []


def test_c14_victims_are_not_removed_and_may_be_fewer():
    policy = make("a", "b")
    assert policy.victims(5, ()) == ["a", "b"]
    assert len(policy) == 2


def test_c11_keys_to_keep_are_passed_over():
    policy = make("a", "b", "c", "d")
    assert policy.victims(2, {"a", "c"}) == ["b", "d"]


def test_c13_held_keys_are_no_victims_until_released():
    policy = make("a", "b")
    policy.hold("a")
    policy.hold("a")
    assert policy.victims(2, ()) == ["b"]
    assert len(policy) == 1
    policy.touch("a")  # a held key is no candidate: nothing to reorder
    policy.release("a")
    assert policy.victims(2, ()) == ["b", "a"]
    policy.release("b")
    assert policy.victims(2, ()) == ["a", "b"]


def test_removed_keys_are_forgotten_wherever_they_were():
    policy = make("a", "b")
    policy.hold("b")
    for key in ("a", "b", "unknown"):
        policy.remove(key)
    assert len(policy) == 0
    policy.touch("a")
    policy.insert("b")
    assert policy.victims(2, ()) == ["b"]


def test_inserting_twice_is_a_mistake_of_the_caller():
    policy = make("a", "b")
    policy.hold("b")
    for key in ("a", "b"):
        with pytest.raises(AssertionError, match="inserted"):
            policy.insert(key)


def test_c54_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'lfru'.*known are: .*lru"):
        make_policy("lfru", 10)


class CountingKey:
    """Counts how often keys of this class are looked at."""

    looks = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        CountingKey.looks += 1
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


def test_k11_o1_cost_depends_on_the_keys_asked_for_not_on_the_pool():
    policy: LRU[CountingKey] = LRU()
    keys = [CountingKey(number) for number in range(20_000)]
    for key in keys:
        policy.insert(key)
    for key in keys[:-10]:
        policy.hold(key)
    CountingKey.looks = 0
    for _ in range(100):
        assert len(policy.victims(5, ())) == 5
    assert CountingKey.looks <= 100 * 5 * 3


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["insert", "touch", "hold", "release", "remove"]), st.integers(0, 5)),
    max_size=60,
)


@given(OPERATIONS, st.integers(0, 7), st.frozensets(st.integers(0, 5)))
def test_c14_lru_agrees_with_a_plain_model(operations, n, keep):
    policy: LRU[int] = LRU()
    order: OrderedDict[int, None] = OrderedDict()  # candidates, oldest use first
    held: set[int] = set()
    for name, key in operations:
        known = key in order or key in held
        if (name == "insert" and known) or (name in {"hold", "release"} and not known):
            continue
        getattr(policy, name)(key)
        if name == "touch" and key in order:
            order.move_to_end(key)
        elif name in {"insert", "release"}:
            held.discard(key)
            order[key] = None
            order.move_to_end(key)
        elif name == "hold":
            order.pop(key, None)
            held.add(key)
        elif name == "remove":
            order.pop(key, None)
            held.discard(key)
    assert len(policy) == len(order)
    assert policy.victims(n, keep) == [key for key in order if key not in keep][:n]
