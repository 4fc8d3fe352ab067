"""What a bucket loses by dropping whole packs: bytes of blocks that don't count, and hits.

``python benchmarks/objectstore_waste.py [--json]``. Simulates engines that share a full bucket, with the tier's own
table of packs; a seed gives the same figures. A prompt is a system prompt that many share, a conversation that grows
with each turn. Each minute every engine serves a prompt, all at once, and then they look at the bucket. So of what two
of them need for the first time each stores a copy.

The same is done with packs of one block, which nothing could compact further. ``ideal_hit_rate`` is that of one cache
for all engines where nothing is stored twice. ``copies`` are bytes, as a share of the capacity: the most there
ever were.

Decides who asks for what; what is stored and what leaves is up to ``PackTable``.
"""

import argparse
import json
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvtier_core.tier import OffloadKey
from kvtier_fsspec.keeper import free_share
from kvtier_fsspec.packs import Index, Pack, PackName, PackTable, most_blocks

ROW = 128 << 10
SYSTEM_PROMPTS = 20
SYSTEM_BLOCKS = 40
TURN_BLOCKS = 30
LONGEST = 12
"""Turns of a conversation."""
ROUND_S = 60.0


def conversation(rng: random.Random, number: int) -> list[OffloadKey]:
    """The blocks of a whole one: those of a system prompt, then its own."""
    system = min(int(rng.expovariate(0.3)), SYSTEM_PROMPTS - 1)
    names = [f"system {system} {block}" for block in range(SYSTEM_BLOCKS)]
    names += [f"turn {number} {block}" for block in range(LONGEST * TURN_BLOCKS)]
    return [OffloadKey(name.encode()) for name in names]


class Prompts:
    """Which prompt comes next: of one of the conversations that are open, by one turn longer than before."""

    def __init__(self, rng: random.Random, open_at_once: int) -> None:
        self._rng = rng
        self._count = 0
        self._open: list[list[OffloadKey]] = []
        self._turns: list[int] = []
        while len(self._open) < open_at_once:
            self._begin(len(self._open))

    def _begin(self, place: int) -> None:
        self._count += 1
        self._open[place : place + 1] = [conversation(self._rng, self._count)]
        self._turns[place : place + 1] = [0]

    def next(self) -> list[OffloadKey]:
        """The blocks of a prompt."""
        place = self._rng.randrange(len(self._open))
        self._turns[place] += 1
        keys = self._open[place][: SYSTEM_BLOCKS + TURN_BLOCKS * self._turns[place]]
        if self._turns[place] == LONGEST or self._rng.random() < 1 / LONGEST:
            self._begin(place)
        return keys


class Ideal:
    """Blocks that leave one by one, the longest unused first, and of a prompt its end."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity // ROW
        self._blocks: OrderedDict[OffloadKey, None] = OrderedDict()

    def serve(self, keys: list[OffloadKey]) -> int:
        """How many blocks of a prompt are there, from its beginning; then all are."""
        hits = next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return hits


@dataclass
class Engine:
    """One engine's view of the bucket."""

    writer: str
    table: PackTable


@dataclass
class Shared:
    """The bucket, and the engines on it."""

    capacity: int
    most: int
    """Blocks in a pack."""
    engines: list[Engine]
    packs: dict[str, Pack] = field(default_factory=dict)
    new: list[Pack] = field(default_factory=list)
    """Stored since the last second."""
    gone: list[str] = field(default_factory=list)

    def serve(self, engine: Engine, keys: list[OffloadKey], now: float) -> int:
        """How many blocks of a prompt are there, from its beginning; the others are stored."""
        hits = [*engine.table.find(keys), False].index(False)
        engine.table.use(keys[:hits], now)
        rest = [key for key, there in zip(keys, engine.table.find(keys), strict=True) if not there]
        for begin in range(0, len(rest), self.most):
            index = Index(tuple(rest[begin : begin + self.most]))
            size = len(index.text())
            self._remove(engine.table.make_room(len(index.keys) * ROW + size, now))
            name = PackName.of(engine.table.next_stamp(now), engine.writer, len(index.keys), size)
            self.packs[name.text] = Pack(name, index, now)
            self.new.append(self.packs[name.text])
            engine.table.add([Pack(name, index, now)])
        return hits

    def look(self, now: float) -> None:
        """All engines learn what is new and what is gone, and the first one keeps."""
        for engine in self.engines:
            engine.table.drop(self.gone)
            engine.table.add(Pack(pack.name, Index(pack.keys), now) for pack in self.new)
            engine.table.take_changes()
        self.new, self.gone = [], []
        keeper = self.engines[0].table
        superseded = keeper.superseded()
        keeper.drop(superseded)
        self._remove([self.packs[name] for name in superseded])
        self._remove(keeper.make_room(free_share(self.capacity), now))
        for engine in self.engines:
            uses = engine.table.used_here(now)
            for other in self.engines:
                other.table.used_elsewhere(uses)

    def _remove(self, packs: list[Pack]) -> None:
        for pack in packs:
            if self.packs.pop(pack.name.text, None) is not None:
                self.gone.append(pack.name.text)

    def copies(self) -> int:
        """Blocks in the bucket that a later pack has as well."""
        held = Counter(key for pack in self.packs.values() for key in pack.keys)
        return held.total() - len(held)


def run(seed: int, engines: int, rounds: int, capacity: int, most: int) -> dict[str, float]:
    """One simulation; the hit rates are those of the second half, when the bucket is full."""
    rng = random.Random(seed)
    shared = Shared(
        capacity, most, [Engine(f"{number:08x}", PackTable(ROW, capacity, None)) for number in range(engines)]
    )
    ideal = Ideal(capacity)
    prompts = Prompts(rng, open_at_once=capacity // ROW // (SYSTEM_BLOCKS + TURN_BLOCKS * LONGEST // 2))
    seen, most_copies = Counter[str](), 0
    for number in range(1, rounds + 1):
        now, counts = number * ROUND_S, number > rounds // 2
        for engine in shared.engines:
            keys = prompts.next()
            hits, best = shared.serve(engine, keys, now), ideal.serve(keys)
            if counts:
                seen.update(asked=len(keys), hits=hits, ideal=best)
        shared.look(now)
        most_copies = max(most_copies, shared.copies())
    return {
        "copies": round(most_copies * ROW / capacity, 4),
        "hit_rate": round(seen["hits"] / seen["asked"], 4),
        "ideal_hit_rate": round(seen["ideal"] / seen["asked"], 4),
    }


def main() -> None:
    """Parse, simulate, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--capacity", type=int, default=2 << 30, help="in bytes (default 2 GiB)")
    arguments = parser.parse_args()
    found = {
        f"packs_of_{most}": run(arguments.seed, arguments.engines, arguments.rounds, arguments.capacity, most)
        for most in (most_blocks(ROW, arguments.capacity), 1)
    }
    print(json.dumps(found, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
