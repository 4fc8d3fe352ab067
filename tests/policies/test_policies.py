"""Every policy of the core against a naive one, and what each is for."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier_core.errors import ConfigError
from kvtier_core.keys import OffloadKey
from kvtier_core.policies import Entry, EvictionPolicy, make_policy
from kvtier_testing.policies import PolicyTests
from tests.policies.every import EVERY, FROM_PLUGINS
from tests.policies.oracles import ORACLES


def key(number: int) -> OffloadKey:
    return OffloadKey(number.to_bytes(36, "big"))


class Versus(RuleBasedStateMachine):
    """One policy and its oracle get the same calls and must give the same victims in the same order."""

    name = "lru"

    def __init__(self):
        super().__init__()
        self.entries: dict[int, Entry] = {}  # by key, those in the policy
        self.leases: dict[OffloadKey, None] = {}
        self.policy: EvictionPolicy[Entry]

    @initialize(capacity=st.integers(1, 12))
    def begin(self, capacity):
        self.policy = EVERY[self.name](capacity)
        self.oracle = ORACLES[self.name](capacity)

    @property
    def held(self):
        return {number for number, entry in self.entries.items() if entry.pins or entry.key in self.leases}

    def come_to(self, chain, numbers):
        for number in numbers:
            self.entries[number].chain = chain
            self.entries[number].depth = number if chain else 0
            self.oracle.chains[number] = chain

    @rule(
        numbers=st.lists(st.integers(0, 15), unique=True, max_size=6),
        pins=st.integers(0, 1),
        chain=st.integers(0, 3),
    )
    def insert(self, numbers, pins, chain):
        fresh = sorted(number for number in numbers if number not in self.entries)
        new = [Entry.of(key(number)) for number in fresh]
        for number, entry in zip(fresh, new, strict=True):
            entry.pins = pins
            self.entries[number] = entry
        self.come_to(chain, fresh)
        self.policy.insert(new)
        self.oracle.insert(fresh)

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), is_use=st.booleans(), is_pin=st.booleans())
    def hold(self, data, is_use, is_pin):
        number = data.draw(st.sampled_from(sorted(self.entries)))
        entry = self.entries[number]
        if is_pin:
            entry.pins += 1
        else:
            self.leases[entry.key] = None
        entry.uses += is_use
        self.oracle.uses[number] += is_use

    @precondition(lambda self: self.held)
    @rule(data=st.data(), chain=st.integers(0, 3))
    def release(self, data, chain):
        numbers = sorted(data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=4)))
        if chain:
            self.come_to(chain, numbers)
        for number in numbers:
            self.entries[number].pins = 0
            self.leases.pop(self.entries[number].key, None)
        self.policy.release([self.entries[number] for number in numbers])
        self.oracle.release(numbers)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def remove(self, data):
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.entries)), unique=True, max_size=2))
        self.policy.remove([self.entries.pop(number) for number in numbers])
        self.oracle.remove(numbers)

    @rule(data=st.data())
    def evict(self, data):
        n = data.draw(st.integers(0, len(self.entries.keys() - self.held)))
        victims = self.policy.evict(n, self.leases.keys())
        expected = self.oracle.evict(n, self.held)
        assert [int.from_bytes(victim.key, "big") for victim in victims] == expected
        assert len(expected) == n
        for number in expected:
            del self.entries[number]


@pytest.mark.parametrize("name", ORACLES)
def test_c14_a_policy_agrees_with_a_naive_one(name):
    class Machine(Versus):
        pass

    Machine.name = name
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=50, stateful_step_count=50, deadline=None)
    )


def test_c14_every_policy_of_the_core_has_a_naive_one():
    assert EVERY.keys() == ORACLES.keys()


def make(name: str, capacity: int, *numbers: int) -> tuple[EvictionPolicy[Entry], dict[int, Entry]]:
    """A policy with these keys, the first the oldest."""
    policy: EvictionPolicy[Entry] = EVERY[name](capacity)
    entries = {number: Entry.of(key(number)) for number in numbers}
    for entry in entries.values():
        policy.insert([entry])
    return policy, entries


def use(policy: EvictionPolicy[Entry], *entries: Entry) -> None:
    for entry in entries:
        entry.uses += 1
    policy.release(entries)


def out(policy: EvictionPolicy[Entry], n: int) -> list[int]:
    return [int.from_bytes(entry.key, "big") for entry in policy.evict(n, frozenset())]


def test_c14_lru_the_longest_unused_leaves_first():
    policy, entries = make("lru", 3, 1, 2, 3)
    use(policy, entries[1])
    assert out(policy, 3) == [2, 3, 1]


@pytest.mark.parametrize("name", EVERY)
def test_c11_of_one_call_the_tail_leaves_before_the_head(name):
    policy, _ = make(name, 100)
    policy.insert([Entry.of(key(number)) for number in range(100)])
    assert out(policy, 100) == list(range(99, -1, -1))


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_c14_a_scan_does_not_drive_out_what_is_used_again(name):
    policy, entries = make(name, 20, *range(10))
    use(policy, *entries.values())
    for number in range(100, 200):
        policy.insert([Entry.of(key(number))])
        if number >= 110:
            assert out(policy, 1)[0] >= 100
    assert sorted(out(policy, 20))[:10] == list(range(10))


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_c14_a_key_that_comes_back_is_worth_more_than_a_new_one(name):
    policy, _ = make(name, 20, *range(20))
    gone = out(policy, 10)
    policy.insert([Entry.of(key(gone[0]))])
    for number in range(100, 109):
        policy.insert([Entry.of(key(number))])
    assert gone[0] not in out(policy, 15)


def test_c14_arc_learns_that_recent_keys_are_wanted():
    policy, entries = make("arc", 4, 1, 2, 3, 4)
    use(policy, entries[1], entries[2])
    assert out(policy, 2) == [3, 4], "unused ones first"
    policy.insert([Entry.of(key(3)), Entry.of(key(4))])  # both come back: the recent side was too small
    policy.insert([Entry.of(key(5))])
    assert out(policy, 1) != [5]


@pytest.mark.parametrize("name", EVERY)
def test_c13_a_pin_alone_does_not_make_a_block_look_new(name):
    policy, entries = make(name, 3, 1, 2, 3)
    entries[1].pins += 1
    entries[1].pins -= 1
    policy.release([entries[1]])
    assert out(policy, 1) == [1]


def test_c54_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'lfru'.*known are: arc, lru, s3fifo"):
        make_policy("lfru", 10, FROM_PLUGINS)


class TestLRU(PolicyTests):
    @pytest.fixture
    def make_policy(self):
        return EVERY["lru"]


class TestARC(PolicyTests):
    @pytest.fixture
    def make_policy(self):
        return EVERY["arc"]


class TestS3FIFO(PolicyTests):
    @pytest.fixture
    def make_policy(self):
        return EVERY["s3fifo"]
