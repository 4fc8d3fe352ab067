"""The ledger against a plain one: random calls, with every policy, in which both must agree after each (C11 to C14)."""

from collections import Counter
from random import Random

import pytest

from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.ledger import Block, BlockState, Ledger
from tests.policies.every import EVERY
from tests.sim.books import check_ledger

KEYS = [make_offload_key(bytes([number]) * 32, number % 2) for number in range(14)]


class Oracle:
    """What a ledger must know, without its tables: a few dicts, and everything counted anew for each question."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.states: dict[OffloadKey, BlockState] = {}
        self.pins: Counter[OffloadKey] = Counter()
        """Readers of the ready block that has the key now."""
        self.promises: Counter[OffloadKey] = Counter()
        self.detached: list[int] = []
        """Pins of each block that was detached and is still held."""

    def is_idle(self, key: OffloadKey) -> bool:
        return self.states.get(key) is BlockState.READY and not self.pins[key] and not self.promises[key]

    @property
    def num_free(self) -> int:
        return self.num_rows - len(self.states) - len(self.detached)

    @property
    def room(self) -> int:
        return self.num_free + sum(map(self.is_idle, self.states))


class Run:
    """One ledger and its oracle, driven by requests that promise, read, write, lose and give back."""

    def __init__(self, seed: int, policy: str) -> None:
        self.random = Random(seed)
        num_rows = self.random.randint(1, 8)
        order = EVERY[policy](num_rows)
        self.book = Ledger(num_rows, order)
        self.oracle = Oracle(num_rows)
        self.granted: list[set[OffloadKey]] = [set(), set(), set()]
        """What each of three requests is promised."""
        self.readers: list[list[Block]] = []
        self.writers: list[list[Block]] = []
        self.seen: Counter[str] = Counter()

    def some(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        return self.random.sample(keys, self.random.randint(0, len(keys)))

    def held(self, state: BlockState | None = None) -> list[OffloadKey]:
        return [key for key, its in self.oracle.states.items() if state in (None, its)]

    def step(self) -> None:
        often = (self.reserve, self.write)
        once = (self.read, self.end_read, self.promise, self.give_back, self.use)
        act = self.random.choice((*often, *often, *once, self.detach, self.prefix))
        act()
        self.check()

    def reserve(self) -> None:
        absent = [key for key in KEYS if key not in self.oracle.states]
        new, keep = self.some(absent)[:6], self.some(self.held())
        idle = {key for key in self.held() if self.oracle.is_idle(key)}
        needed = len(new) - self.oracle.num_free
        reserved = self.book.reserve(new, keep=keep, writer=1)
        if needed > len(idle - set(keep)):
            assert reserved is None
            self.seen["no room"] += bool(idle)
            return
        assert reserved is not None
        assert [block.key for block in reserved.blocks] == new
        assert len(set(reserved.rows)) == len(new)
        assert len(reserved.evicted) == max(0, needed)
        assert set(reserved.evicted) <= idle - set(keep), "one that was held, or asked for, was evicted"
        self.seen["evicted"] += len(reserved.evicted)
        for key in reserved.evicted:
            del self.oracle.states[key]
        for key in new:
            self.oracle.states[key] = BlockState.ARRIVING
        if new:
            self.writers.append(list(reserved.blocks))

    def write(self) -> None:
        """A writer is done, well or not; a part of what it wrote may have been detached meanwhile."""
        if not self.writers:
            return
        blocks = self.writers.pop(self.random.randrange(len(self.writers)))
        live = [block for block in blocks if block.state is BlockState.ARRIVING]
        if live and self.random.random() < 0.8:
            readers = self.random.randint(0, 2)
            self.book.make_ready(live, pins=readers)
            for block in live:
                self.oracle.states[block.key] = BlockState.READY
                self.oracle.pins[block.key] = readers
            self.readers += [live] * readers
        else:
            self.lose(live)
            self.book.unpin(live)
            for _ in live:
                self.oracle.detached.remove(1)
        gone = [block for block in blocks if block not in live]
        self.book.unpin(gone)
        for _ in gone:
            self.oracle.detached.remove(1)
        self.seen["a writer's block was detached"] += bool(gone)

    def read(self) -> None:
        blocks = self.book.blocks_of(self.some(self.held(BlockState.READY)))
        if blocks:
            self.book.pin(blocks)
            self.oracle.pins.update(block.key for block in blocks)
            self.readers.append(blocks)

    def end_read(self) -> None:
        if not self.readers:
            return
        blocks = self.readers.pop(self.random.randrange(len(self.readers)))
        for block in blocks:
            if block.state is BlockState.DETACHED:
                self.oracle.detached.remove(block.pins)
                if block.pins > 1:
                    self.oracle.detached.append(block.pins - 1)
                self.seen["read after a detach"] += 1
            else:
                self.oracle.pins[block.key] -= 1
        self.book.unpin(blocks)

    def promise(self) -> None:
        request = self.random.randrange(3)
        keys = set(self.some(self.held())) - self.granted[request]
        self.book.lease(keys)
        self.granted[request] |= keys
        self.oracle.promises.update(keys)

    def give_back(self) -> None:
        request = self.random.randrange(3)
        keys = self.some(sorted(self.granted[request]))
        self.book.unlease(keys, known=self.some(keys))
        self.granted[request].difference_update(keys)
        self.oracle.promises.subtract(keys)

    def use(self) -> None:
        blocks = self.book.blocks_of(self.some(self.held()))
        self.book.use(zip(blocks, range(len(blocks)), strict=True), chain=1)

    def detach(self) -> None:
        if self.random.random() < 0.3:
            self.lose(self.book.blocks_of(self.some(self.held())))

    def lose(self, blocks: list[Block]) -> None:
        keys = [block.key for block in blocks]
        promised = {key for key in keys if self.oracle.promises[key]}
        assert set(self.book.detach(blocks)) == promised
        for block in blocks:
            pins = 1 if self.oracle.states[block.key] is BlockState.ARRIVING else self.oracle.pins[block.key]
            self.oracle.detached += [pins] * bool(pins)
            del self.oracle.states[block.key]
            del self.oracle.pins[block.key], self.oracle.promises[block.key]
            for granted in self.granted:
                granted.discard(block.key)

    def prefix(self) -> None:
        keys = [self.random.choice(KEYS) for _ in range(self.random.randint(0, 6))]
        ready = self.book.ready_prefix(keys)
        assert ready == keys[: len(ready)]
        assert all(self.oracle.states.get(key) is BlockState.READY for key in ready)
        if len(ready) < len(keys):
            assert self.oracle.states.get(keys[len(ready)]) is not BlockState.READY
        assert self.book.are_ready(keys) == [self.oracle.states.get(key) is BlockState.READY for key in keys]
        assert self.book.holds_any(keys) == any(key in self.oracle.states for key in keys)

    def check(self) -> None:
        book, oracle = self.book, self.oracle
        check_ledger(book)
        assert {block.key: block.state for block in book.blocks} == oracle.states
        assert (book.num_free, book.room, book.num_detached) == (
            oracle.num_free,
            oracle.room,
            len(oracle.detached),
        )
        assert book.leases == {key for key, count in oracle.promises.items() if count}
        for key in KEYS:
            assert book.num_leases(key) == oracle.promises[key]
            block = book.find(key)
            if block is not None:
                assert book.is_idle(block) is oracle.is_idle(key)
                assert block.state is BlockState.ARRIVING or block.pins == oracle.pins[key]

    def come_to_rest(self) -> None:
        """Everything ends; then a whole pool of new blocks fits, and the policy gives each of the old ones out once."""
        while self.writers:
            self.write()
        while self.readers:
            self.end_read()
        for request in range(3):
            keys = sorted(self.granted[request])
            self.book.unlease(keys)
            self.granted[request].clear()
            self.oracle.promises.subtract(keys)
        self.check()
        assert self.book.room == self.book.num_rows
        held = set(self.oracle.states)
        new = [make_offload_key(bytes([200, number] * 16), 0) for number in range(self.book.num_rows)]
        reserved = self.book.reserve(new)
        assert reserved is not None
        assert sorted(reserved.evicted) == sorted(held)
        check_ledger(self.book)


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_c13_c14_the_ledger_agrees_with_a_plain_one_whatever_happens(policy):
    seen: Counter[str] = Counter()
    for seed in range(60):
        run = Run(seed, policy)
        for _ in range(150):
            run.step()
        run.come_to_rest()
        seen += run.seen
    assert len(seen) == 4, f"not everything was tried: {seen}"
