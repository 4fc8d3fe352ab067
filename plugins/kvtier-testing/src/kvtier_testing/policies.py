"""One test class for every eviction policy: what the contract (C11, C13, C14) asks whatever the order is.

A policy's own test file subclasses ``PolicyTests`` and says how one is made::

    class TestMine(PolicyTests):
        @pytest.fixture
        def make_policy(self):
            return Mine  # called with the capacity, in blocks
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_core.policies import Entry, EvictionPolicy, PolicyFactory


def _entries(count: int, first: int = 0) -> list[Entry]:
    return [Entry.of(OffloadKey(number.to_bytes(36, "big"))) for number in range(first, first + count)]


class _Watched(Entry):
    """Counts how often a policy asks whether one of these is held."""

    __slots__ = ("_pins",)
    looks = 0

    @property
    def pins(self) -> int:
        """As ``Entry.pins``."""
        _Watched.looks += 1
        return self._pins

    @pins.setter
    def pins(self, pins: int) -> None:
        self._pins = pins


class _Run:
    """Random calls, as a pool makes them, beside a plain set of what the policy was given."""

    def __init__(self, policy: EvictionPolicy[Any], capacity: int, seed: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.random = random.Random(seed)  # noqa: S311 - a test's, to be repeated
        self.known: set[Entry] = set()
        self.leases: dict[OffloadKey, None] = {}
        self.left: list[Entry] = []
        """Entries that were given out or removed, to be used again."""
        self.next_key = 0

    def sample(self, entries: Sequence[Entry], most: int = 4) -> list[Entry]:
        return self.random.sample(entries, self.random.randint(0, min(most, len(entries))))

    def is_held(self, entry: Entry) -> bool:
        return entry.pins > 0 or entry.key in self.leases

    def idle(self) -> list[Entry]:
        return sorted((entry for entry in self.known if not self.is_held(entry)), key=lambda entry: entry.key)

    def step(self) -> None:
        held = sorted((entry for entry in self.known if self.is_held(entry)), key=lambda entry: entry.key)
        match self.random.choice(("insert", "hold", "release", "remove", "evict", "evict")):
            case "insert":
                room = self.capacity - len(self.known)
                new = _entries(min(room, self.random.randint(1, 5)), self.next_key)
                self.next_key = (self.next_key + len(new)) % (3 * self.capacity)
                known_keys = {entry.key for entry in self.known}
                self.insert([entry.key for entry in new if entry.key not in known_keys])
            case "hold":
                for entry in self.sample(self.idle()):
                    if self.random.randint(0, 1):
                        entry.pins += 1
                    else:
                        self.leases[entry.key] = None
                    entry.uses += self.random.randint(0, 1)
            case "release":
                released = self.sample(held)
                self.release(released)
            case "remove":
                removed = self.sample(sorted(self.known, key=lambda entry: entry.key), 1)
                self.known.difference_update(removed)
                self.policy.remove(removed)
                self.left += removed
            case _:
                self.evict()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        new = [self.left.pop() if self.left else Entry() for _ in keys]
        for entry, key in zip(new, keys, strict=True):
            entry.key = key
            entry.chain = self.random.randint(0, 3)
            entry.depth = entry.pins = entry.uses = 0
            entry.place = None
        self.known.update(new)
        self.policy.insert(new)

    def release(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.pins = 0
            self.leases.pop(entry.key, None)
        self.policy.release(entries)

    def evict(self) -> None:
        idle = self.idle()
        n = self.random.randint(0, len(idle))
        victims = self.policy.evict(n, self.leases.keys())
        assert len(victims) == len(set(victims)) == n, "as many as asked for, each once"
        assert self.known.issuperset(victims), "only what it was given and has not given out"
        assert not [victim for victim in victims if victim.pins], "nothing that is pinned (C13)"
        assert self.leases.keys().isdisjoint([victim.key for victim in victims]), "nothing to be kept (C13)"
        self.known.difference_update(victims)
        self.left += victims


class PolicyTests:
    """The tests."""

    @pytest.fixture
    def make_policy(self) -> PolicyFactory:
        """Makes the policy; called with a capacity in blocks."""
        raise NotImplementedError("override the fixture make_policy")

    @pytest.mark.parametrize("seed", range(5))
    def test_c13_c11_victims_are_known_idle_and_as_many_as_asked_for(
        self, make_policy: PolicyFactory, seed: int
    ) -> None:
        """Over a random run: neither held blocks nor those asked for are given out, and none is lost."""
        run = _Run(make_policy(20), 20, seed)
        for _ in range(2000):
            run.step()
        run.release(sorted(run.known, key=lambda entry: entry.key))
        rest = set(run.policy.evict(len(run.known), frozenset()))
        assert rest == run.known, (
            f"{len(run.known)} blocks were idle at the end, and evict gave {len(rest)} of them"
        )

    def test_c13_a_block_that_was_met_while_held_can_leave_once_released(
        self, make_policy: PolicyFactory
    ) -> None:
        """However often it was met."""
        policy = make_policy(4)
        entries = _entries(4)
        policy.insert(entries)
        for entry in entries[:2]:
            entry.pins += 1
        assert set(policy.evict(2, frozenset())) == set(entries[2:]), "not the two blocks that are not held"
        assert policy.evict(0, frozenset()) == [], "evict(0) gave something"
        for entry in entries[:2]:
            entry.pins -= 1
        policy.release(entries[:2])
        assert set(policy.evict(2, frozenset())) == set(entries[:2]), "not the two blocks that were released"

    def test_a_removed_block_never_leaves_again(self, make_policy: PolicyFactory) -> None:
        """Nor is it an error to remove what was evicted."""
        policy = make_policy(4)
        entries = _entries(4)
        policy.insert(entries)
        policy.remove(entries[1:2])
        assert set(policy.evict(3, frozenset())) == {entries[0], *entries[2:]}, "not the three that were left"
        policy.remove(entries)

    @pytest.mark.parametrize("hold", ["pin", "lease"])
    def test_k11_o1_c14_the_cost_does_not_grow_with_what_is_held(
        self, make_policy: PolicyFactory, hold: str
    ) -> None:
        """A held block is looked at once, by whichever call meets it first, not by every call."""
        policy = make_policy(20_000)
        entries = [_Watched.of(entry.key) for entry in _entries(20_000)]
        policy.insert(entries)
        keep: set[OffloadKey] = set()
        for entry in entries[:-100]:
            if hold == "pin":
                entry.pins = 1
            else:
                keep.add(entry.key)
        _Watched.looks = 0
        for _ in range(100):
            assert len(policy.evict(1, keep)) == 1, "evict(1) did not give one"
        looks = _Watched.looks
        assert looks <= 3 * len(entries), (
            f"{looks} looks at {len(entries)} blocks: held ones are looked at again"
        )
