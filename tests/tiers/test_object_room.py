"""Several engines and one bucket, by the deciding parts alone: room before a store, what the keeper removes."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from kvtier_fsspec.keeper import text_of, uses_in
from kvtier_fsspec.packs import Index, Pack, PackName, PackTable
from kvtier_fsspec.room import Room, Turn
from kvtier_testing.rows import similar_keys

SIZE = 4096
KEYS = similar_keys(60)
PACK = 8
"""Blocks in one."""
CAPACITY = 40 * (SIZE + 100)


@dataclass
class Bucket:
    """What the service has: packs by name."""

    packs: dict[str, Pack] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(pack.name.bytes(SIZE) for pack in self.packs.values())


class Engine:
    """One engine's view, and the stores that it has in flight."""

    def __init__(self, number: int, bucket: Bucket, skew: float) -> None:
        self.skew = skew
        self.writer = f"{number:08x}"
        self.bucket = bucket
        self.table = PackTable(SIZE, CAPACITY, None)
        self.room = Room(CAPACITY)
        self.in_flight: list[Pack] = []
        self.saw: Counter[Turn] = Counter()

    def look(self, now: float) -> None:
        shown = self.room.begin_look()
        self.table.drop(self.table.lacking(self.bucket.packs, now))
        self.table.add(Pack(pack.name, Index(pack.keys), now - 1, now) for pack in self.bucket.packs.values())
        self.room.looked(shown)

    def begin(self, keys, now: float) -> None:
        index = Index(tuple(keys))
        needed = len(keys) * SIZE + len(index.text())
        turn = self.room.next_turn(needed, self.table.bytes)
        self.saw[turn] += 1
        if turn is Turn.LOOK:
            self.look(now)
            self.room.end_turn()
            turn = self.room.next_turn(needed, self.table.bytes)
            assert turn is Turn.GO
        if turn is Turn.GO:
            self.remove(pack.name.text for pack in self.table.make_room(needed, now))
            name = PackName.of(self.table.next_stamp(now), self.writer, len(keys), len(index.text()))
            self.in_flight.append(Pack(name, index, now))

    def land(self) -> None:
        """The service has it, or the engine is gone before."""
        pack = self.in_flight.pop(0)
        self.bucket.packs[pack.name.text] = pack
        self.room.stored(pack.name.bytes(SIZE))
        self.table.add([Pack(pack.name, Index(pack.keys), pack.known)])

    def keep(self, now: float, *, is_killed: bool) -> int:
        before = self.table.find(KEYS)
        superseded = self.table.superseded()
        self.table.drop(superseded)
        assert self.table.find(KEYS) == before, "of a block that counts nothing was removed"
        going = [*superseded, *(pack.name.text for pack in self.table.make_room(CAPACITY // 32, now))]
        self.remove(going[: len(going) // 2] if is_killed else going)
        return len(superseded)

    def remove(self, names) -> None:
        for name in names:
            self.bucket.packs.pop(name, None)


@pytest.mark.parametrize("seed", range(30))
def test_i18_engines_that_share_a_bucket_are_over_its_capacity_by_one_pack_each_at_most(seed):
    rng = random.Random(seed)
    bucket, saw, peak = Bucket(), Counter[str](), 0
    skews = [rng.choice((0, 0, 20, -20, 4000, -4000)) for _ in range(rng.randint(1, 10))]
    engines = [Engine(number, bucket, skew) for number, skew in enumerate(skews)]
    most = CAPACITY + len(engines) * (PACK * SIZE + 400)
    for step in range(1, 1500):
        engine = rng.choice(engines)
        now = 10_000 + step / 4 + engine.skew
        what = rng.choices(("begin", "land", "look", "keep", "kill"), (6, 6, 2, 1, 0.1))[0]
        if what == "begin":
            first = rng.randrange(len(KEYS) - PACK)
            engine.begin(KEYS[first : first + rng.randint(1, PACK)], now)
        elif what == "land" and engine.in_flight:
            engine.land()
        elif what == "look":
            engine.look(now)
        elif what == "keep" and rng.random() < 0.5:  # two may keep at a time
            saw["superseded"] += engine.keep(now, is_killed=False)
        elif what == "kill":
            engine.keep(now, is_killed=True)  # in the middle of it
            engines[engines.index(engine)] = Engine(step, bucket, engine.skew)
            saw["killed"] += len(engine.in_flight)
        peak = max(peak, bucket.bytes)
        assert bucket.bytes <= most
    assert peak > CAPACITY * 0.8
    assert saw["superseded"]
    assert len(engines) == 1 or any(engine.saw[Turn.LOOK] for engine in engines)


def test_i18_stores_far_below_the_capacity_never_look_and_near_it_one_after_the_other():
    room = Room(1600)
    assert [room.next_turn(10, 0) for _ in range(9)] == [Turn.GO] * 9, "a sixteenth of what is free"
    assert room.next_turn(10, 0) is Turn.WAIT
    for _ in range(9):
        room.stored(10)
    assert room.next_turn(10, 90) is Turn.LOOK
    assert room.next_turn(10, 90) is Turn.WAIT, "one looks"
    room.looked(room.begin_look())
    room.end_turn()
    assert [room.next_turn(10, 1590), room.next_turn(10, 1590)] == [Turn.GO, Turn.WAIT]
    assert [Room(None).next_turn(1 << 40, 1 << 50) for _ in range(3)] == [Turn.GO] * 3


def test_i18_what_later_packs_name_is_superseded_and_no_other():
    table = PackTable(SIZE, None, None)

    def add(stamp: int, keys, *, note: bool = False) -> None:
        index = Index(tuple(keys))
        name = PackName.of(stamp, "0" * 8, 0 if note else len(keys), len(index.text()))
        table.add([Pack(name, index, 0.0)])

    for stamp, keys in ((1, KEYS[:4]), (2, KEYS[:2]), (3, KEYS[2:3])):
        add(stamp, keys)
    assert table.superseded() == []
    add(4, KEYS[3:4], note=True)
    assert [PackName.read(name).stamp for name in table.superseded()] == [1]
    add(5, KEYS[:2])
    assert {PackName.read(name).stamp for name in table.superseded()} == {1, 2}


def test_i18_lists_of_uses_are_read_back_and_nothing_else_is_one():
    uses = {f"{stamp:012x}-{'0' * 8}-40-99": 1000.0 + stamp for stamp in range(50)}
    assert uses_in(text_of(uses), 1030.0) == {name: min(when, 1030.0) for name, when in uses.items()}
    assert text_of(uses).splitlines()[0].startswith(f"{49:012x}".encode())
    assert uses_in(b"\xff\n\nx\nname -5\nname 99999999999999999999\n" + b"a" * 100, 1.0) == {}


def test_i18_a_pack_that_others_use_stays():
    table = PackTable(SIZE, 3 * (SIZE + 100), None)
    for stamp in (60_000, 120_000, 180_000):
        index = Index((KEYS[stamp // 60_000],))
        table.add([Pack(PackName.of(stamp, "0" * 8, 1, len(index.text())), index, 0.0)])
    first = table.names[0]
    table.used_elsewhere({first: 900.0, "who": 5.0})
    assert [pack.name.stamp for pack in table.make_room(SIZE, 1000.0)] == [120_000]
    assert table.used_here(1.0) == {}
    table.use(KEYS[3:4], 950.0)
    assert table.used_here(1.0) == {table.names[-1]: 950.0}
