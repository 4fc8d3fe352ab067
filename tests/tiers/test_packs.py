"""What a bucket holds, as the object-store tier sees it: names, indexes, and a table that is driven at random."""

import itertools
import random

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_fsspec.packs import (
    PACK_BYTES,
    Index,
    Pack,
    PackName,
    PackTable,
    first_name_of,
)
from kvtier_fsspec.scatter import Scatter
from kvtier_testing.rows import similar_keys

KEYS = similar_keys(24)
SIZE = 4096


def pack(stamp: int, keys, *, note: bool = False, known: float = 0.0) -> Pack:
    index = Index(tuple(keys))
    name = PackName.of(stamp, "0" * 8, 0 if note else len(keys), len(index.text()))
    return Pack(name, index, known)


def never(_packed: bytearray, _into: memoryview) -> bool:
    raise AssertionError("rows as they are were unpacked")


def test_i18_an_index_says_its_keys_and_nothing_else_is_one():
    for keys in ([], KEYS[:1], KEYS, [OffloadKey(b""), OffloadKey(b"x" * 300)]):
        for sizes in (None, tuple(range(1, 1 + len(keys)))):
            index = Index(tuple(keys), sizes)
            assert Index.read(index.text()) == index
    assert Index.read(b"") is Index.read(b"kvtier-1") is Index.read(b"kvtier-2") is None
    for good in (Index(tuple(KEYS)).text(), Index(tuple(KEYS), tuple(range(len(KEYS)))).text()):
        for at in range(0, len(good), 7):
            assert Index.read(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]) is None
            assert Index.read(good[:at]) is None


def test_i18_names_are_in_the_order_of_their_stamps_and_read_back():
    stamps = (0, 1, 1 << 20, 1 << 40, (1 << 48) - 1)
    names = [
        PackName.of(stamp, "89abcdef", 64, 2440, packed) for stamp in stamps for packed in (None, 1 << 39)
    ]
    assert sorted(name.text for name in names) == [name.text for name in names]
    for name in names:
        assert PackName.read(name.text) == name
        assert first_name_of(name.stamp) < name.text
        assert name.stamp == 0 or first_name_of(name.stamp) > names[1].text
    for text in ("", "namespace.json", names[1].text + "0", names[1].text.upper() + "G", names[1].text[1:]):
        read = PackName.read(text)
        assert read is None or read.text != names[1].text
    assert PackName.read(f"{KEYS[0].hex()}.kv") is None


def test_i18_the_last_pack_by_name_counts_in_whatever_order_packs_are_found():
    packs = [pack(1, KEYS[:4]), pack(2, KEYS[:2], note=True), pack(3, KEYS[1:2]), pack(4, KEYS[3:5])]
    for order in itertools.permutations(packs):
        table = PackTable(SIZE, None, None)
        for one in order:
            table.add([one])
        assert table.find(KEYS[:6]) == [False, True, True, True, True, False]
        reads = {read.pack.name.stamp: read.wanted for read in table.plan(KEYS[:6])}
        assert reads == {3: ((0, 1),), 1: ((2, 2),), 4: ((0, 3), (1, 4))}


def test_i18_a_stamp_is_later_than_all_that_are_known():
    table = PackTable(SIZE, None, None)
    assert [table.next_stamp(2.0), table.next_stamp(2.0), table.next_stamp(1.0)] == [2000, 2001, 2002]
    table.add([pack(9000, KEYS[:1])])
    assert table.next_stamp(3.0) == 9001


def test_i18_packs_of_a_clock_that_is_ahead_are_read_and_leave_in_their_turn():
    table = PackTable(SIZE, 3 * (SIZE + 100), None)
    table.add([pack((1 << 48) - 1, KEYS[:1])])
    name = PackName.of(table.next_stamp(3.0), "0" * 8, 1, 9)
    assert PackName.read(name.text) == name
    table.drop(table.names)
    for number, ahead in enumerate((0, 86_400, 0)):
        at = 1000.0 + 120 * number
        (key,) = KEYS[number : number + 1]
        name = PackName.of(int((at + ahead) * 1000), "0" * 8, 1, len(Index((key,)).text()))
        table.add([Pack(name, Index((key,)), 0.0, at)])
    table.use(KEYS[:1], 1400.0)
    (leaves,) = table.make_room(SIZE, 2000.0)
    assert leaves.keys == (KEYS[1],), "it was stored first of those that were not used since"


def test_i18_neighbours_are_one_read_and_strangers_are_not():
    table = PackTable(SIZE, None, None)
    table.add([pack(1, KEYS)])
    asked = [KEYS[number] for number in (9, 0, 1, 2, 6, 12, 20)]
    assert [(read.first, read.end) for read in table.plan(asked)] == [(0, 13), (20, 21)]
    assert sorted(wanted for read in table.plan(asked) for wanted in read.wanted) == [
        (0, 1), (1, 2), (2, 3), (6, 4), (9, 0), (12, 5), (20, 6),
    ]  # fmt: skip
    (one_key_twice,) = table.plan([KEYS[3], KEYS[3]])
    assert one_key_twice.wanted == ((3, 0), (3, 1))


def test_i18_each_block_is_found_in_its_pack_without_a_search():
    class Key(bytes):
        compared = 0
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            Key.compared += 1
            return bytes.__eq__(self, other)

    keys = [OffloadKey(Key(key)) for key in similar_keys(2000)]
    table = PackTable(SIZE, None, None)
    table.add([pack(1, keys)])
    Key.compared = 0
    asked = [OffloadKey(Key(key)) for key in keys[::-1]]
    assert sum(read.end - read.first for read in table.plan(asked)) == 2000
    assert Key.compared < 10 * 2000


def test_i18_the_parts_of_an_answer_land_in_the_blocks_that_want_them():
    rng = random.Random(7)
    table = PackTable(SIZE, None, None)
    table.add([pack(1, KEYS)])
    content = rng.randbytes(len(KEYS) * SIZE)
    asked = [KEYS[number] for number in (9, 2, 2, 4, 7)]
    (read,) = table.plan(asked)
    answer = memoryview(content[read.first * SIZE : read.end * SIZE] + b"more than was asked for")
    for _ in range(20):
        intos = [bytearray(SIZE) for _ in asked]
        scatter = Scatter(read, SIZE, [memoryview(into) for into in intos], never)
        at = 0
        while at < len(answer):
            some = rng.randint(1, 3 * SIZE)
            scatter.take(answer[at : at + some])
            at += some
        assert [bytes(into) for into in intos] == [
            content[n * SIZE : (n + 1) * SIZE] for n in (9, 2, 2, 4, 7)
        ]


def test_i18_the_longest_unused_leave_first_and_of_a_minute_the_newest():
    table = PackTable(SIZE, 6 * (SIZE + 100), None)
    for number, at in enumerate((10.0, 70.0, 80.0, 190.0, 200.0)):
        table.add([pack(int(at * 1000), KEYS[number : number + 1])])
    table.use(KEYS[:1], 75.0)
    leaving = [one.name.stamp // 1000 for one in table.make_room(6 * SIZE, 230.0)]
    assert leaving == [80, 70, 10, 190, 200], (
        "used at 80, 70, 75; those of the last minute go last, and in order"
    )


def test_i18_notes_outlive_what_they_remove():
    table = PackTable(SIZE, 3 * SIZE, None)
    table.add([pack(1, KEYS[:2]), pack(2, KEYS[:1], note=True), pack(3, KEYS[4:5])])
    assert table.expired(0.0) == []
    table.take_changes()
    assert {one.name.stamp for one in table.make_room(2 * SIZE, 1000.0)} == {1, 3}
    assert table.take_changes() == ([], [KEYS[4], KEYS[1]])
    assert [PackName.read(name).stamp for name in table.expired(0.0)] == [2]


@pytest.mark.parametrize("seed", range(40))
def test_i18_a_table_is_right_after_whatever_happens(seed):
    rng = random.Random(seed)
    capacity = 12 * SIZE
    table = PackTable(SIZE, capacity, None)
    packs: dict[str, Pack] = {}
    told: set[bytes] = set()
    saw = set()
    for step in range(1, 300):
        what = rng.choice(("store", "store", "delete", "late", "gone", "use"))
        if what in ("store", "delete", "late"):
            keys = rng.sample(KEYS, rng.randint(1, 5))
            stamp = table.next_stamp(float(step)) if what != "late" else rng.randint(1, 1000 * step)
            new = pack(stamp, keys, note=what == "delete", known=float(step))
            if what == "store":
                going = table.make_room(new.name.bytes(SIZE), float(step))
                for one in going:
                    del packs[one.name.text]
                saw |= {"evicted"} if going else set()
                assert not any(one.name.blocks for one in packs.values()) or table.bytes <= capacity
            packs.setdefault(new.name.text, new)
            table.add([new])
        elif what == "gone" and packs:
            lost = rng.choice(list(packs))
            listed = set(packs) - {lost}
            known = packs[lost].known
            assert lost not in table.lacking(listed, known), "the listing may be older than the pack"
            assert table.lacking(listed, known + 1) == [lost]
            del packs[lost]
            table.drop([lost])
        else:
            table.use(rng.sample(KEYS, 3), 60.0 * step)
        if rng.random() < 0.5:
            appeared, gone = table.take_changes()
            assert told.isdisjoint(appeared)
            assert told.issuperset(gone)
            told = (told | set(appeared)) - set(gone)
            saw |= {"removed"} if gone else set()
            assert told == check(table, packs)
    assert saw == {"evicted", "removed"}


def check(table: PackTable, packs: dict[str, Pack]) -> set[bytes]:
    """The keys that are there, by the packs alone; the table says the same."""
    last: dict[bytes, Pack] = {}
    for name in sorted(packs):
        last.update(dict.fromkeys(packs[name].keys, packs[name]))
    there = {key for key, one in last.items() if one.name.blocks}
    assert set(table.names) == set(packs)
    assert table.bytes == sum(one.name.bytes(SIZE) for one in packs.values())
    assert there == {key for key, found in zip(KEYS, table.find(KEYS), strict=True) if found}
    planned = set()
    for read in table.plan(KEYS):
        assert 0 <= read.first < read.end <= read.pack.name.blocks
        assert (read.end - read.first) * SIZE <= PACK_BYTES
        for number, position in read.wanted:
            assert read.first <= number < read.end
            assert read.pack.keys[number] == KEYS[position]
            assert read.pack is last[KEYS[position]]
            planned.add(KEYS[position])
    assert planned == there
    return there
