"""What a bucket holds, and what to do about it: packs, the keys in them, which to read and which leave. Pure.

A *pack* is one immutable object: blocks one after the other, and behind them the index, their keys in that order. Its
name says when it was stored, by whom, and where the index begins, so a listing and one small read tell all of it::

    <stamp, 12 hex>-<writer, 8 hex>-<blocks, hex>-<bytes of the index, hex>[-<bytes of the blocks, hex>]

The last part is there where blocks are *packed* into fewer bytes; the index of such a pack says how many each takes. A
block that takes a whole row is as it is.

The stamp is milliseconds since the epoch, or one more than the newest stamp that its writer knows. A *note* is a pack
without blocks: its keys are those that were removed. Of several packs that name a key the last one by name counts.
"""

import re
import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf
from typing import NamedTuple

from kvtier_core.tier import OffloadKey

PACKS = "packs"
"""The folder of a namespace that they are in."""
PACK_BYTES = 8 << 20
"""Blocks in one pack, in bytes, or one block: more gains a client nothing, and a loss costs more."""
_LEAST_PACKS = 8
"""That have room in a full namespace: what leaves for a store is never most of what is there."""

_MAGIC = b"kvtier-1"
_PACKED_MAGIC = b"kvtier-2"
_LENGTH_BYTES = 2
_SIZE_BYTES = 4
_SUM_BYTES = 4
_NAME = re.compile(r"([0-9a-f]{12})-([0-9a-f]{8})-([0-9a-f]{1,6})-([0-9a-f]{1,8})(?:-([0-9a-f]{1,10}))?")
_LAST_STAMP = 16**12 - 1
"""In the year 10889. A clock that was there once must not end the names that can be read."""
_GAP = 4
"""Blocks between two wanted ones that are read with them: a request costs more."""
_MINUTE_S = 60.0


def most_blocks(block_bytes: int, capacity: int | None) -> int:
    """How many blocks go into one pack."""
    most = PACK_BYTES if capacity is None else min(PACK_BYTES, capacity // _LEAST_PACKS)
    return max(1, most // block_bytes)


class Index(NamedTuple):
    """What is in a pack, in order."""

    keys: tuple[OffloadKey, ...]
    sizes: tuple[int, ...] | None = None
    """Bytes that each block takes; ``None`` where that is a row."""

    def text(self) -> bytes:
        """The index as it is written."""
        named = [len(key).to_bytes(_LENGTH_BYTES, "little") + key for key in self.keys]
        if self.sizes is not None:
            sizes = [size.to_bytes(_SIZE_BYTES, "little") for size in self.sizes]
            named = [size + name for size, name in zip(sizes, named, strict=True)]
        body = (_MAGIC if self.sizes is None else _PACKED_MAGIC) + b"".join(named)
        return body + zlib.crc32(body).to_bytes(_SUM_BYTES, "little")

    @classmethod
    def read(cls, text: bytes) -> "Index | None":
        """The index that *text* is; ``None`` for anything else."""
        body, crc = text[:-_SUM_BYTES], text[-_SUM_BYTES:]
        is_packed = body.startswith(_PACKED_MAGIC)
        if (
            not (is_packed or body.startswith(_MAGIC))
            or zlib.crc32(body).to_bytes(_SUM_BYTES, "little") != crc
        ):
            return None
        keys: list[OffloadKey] = []
        sizes: list[int] = []
        at = len(_MAGIC)
        while at < len(body):
            if is_packed:
                sizes.append(int.from_bytes(body[at : at + _SIZE_BYTES], "little"))
                at += _SIZE_BYTES
            begin = at + _LENGTH_BYTES
            at = begin + int.from_bytes(body[at:begin], "little")
            keys.append(OffloadKey(body[begin:at]))
        return cls(tuple(keys), tuple(sizes) if is_packed else None)

    def fits(self, name: "PackName", block_bytes: int) -> bool:
        """Whether it is the index of a pack of that name."""
        if self.sizes is None:
            return name.packed_bytes is None and name.blocks in (0, len(self.keys))
        is_whole = len(self.keys) == name.blocks and sum(self.sizes) == name.packed_bytes
        return is_whole and all(0 < size <= block_bytes for size in self.sizes)


NOTHING = Index(())


@dataclass(frozen=True, slots=True)
class PackName:
    """What a pack's name says."""

    text: str
    stamp: int
    """Milliseconds since the epoch."""
    writer: str
    """The engine that stored it."""
    blocks: int
    index_bytes: int
    packed_bytes: int | None = None
    """Of the blocks; ``None`` where each is a row."""

    @classmethod
    def of(
        cls, stamp: int, writer: str, blocks: int, index_bytes: int, packed_bytes: int | None = None
    ) -> "PackName":
        """The name of a new pack."""
        text = f"{first_name_of(stamp)}-{writer}-{blocks:x}-{index_bytes:x}"
        if packed_bytes is not None:
            text = f"{text}-{packed_bytes:x}"
        return cls(text, stamp, writer, blocks, index_bytes, packed_bytes)

    @classmethod
    def read(cls, text: str) -> "PackName | None":
        """What *text* says, if it is a pack's name."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        packed = None if match[5] is None else int(match[5], 16)
        return cls(text, int(match[1], 16), match[2], int(match[3], 16), int(match[4], 16), packed)

    @classmethod
    def at(cls, path: str) -> "PackName | None":
        """What the name of the pack at *path* says, if one is there."""
        folder, _, name = path.rpartition("/")
        return cls.read(name) if folder.rpartition("/")[2] == PACKS else None

    def index_at(self, block_bytes: int) -> int:
        """Where the index begins, for blocks of so many bytes."""
        return self.blocks * block_bytes if self.packed_bytes is None else self.packed_bytes

    def bytes(self, block_bytes: int) -> int:
        """The size of the object."""
        return self.index_at(block_bytes) + self.index_bytes


def first_name_of(stamp: int) -> str:
    """No name of that stamp, or a later one, comes before it."""
    return f"{stamp:012x}"


class Pack:
    """A pack that is in the bucket."""

    __slots__ = ("_ends", "keys", "known", "name", "used", "used_here")

    def __init__(self, name: PackName, index: Index, known: float, now: float = inf) -> None:
        self.name = name
        self.keys = index.keys
        """In order; none where the index is damaged."""
        self._ends = None if index.sizes is None else array("Q", accumulate(index.sizes))
        self.known = known
        """When it was entered, on the monotonic clock: a listing that began before may lack it."""
        self.used = min(name.stamp / 1000, now)
        """When one of its blocks was used, as far as known, or it was stored, in seconds since the epoch.

        Not later than *now*, when it was entered: a writer's clock may be ahead.
        """
        self.used_here = 0.0
        """When this engine used one of its blocks."""

    def end_of(self, number: int, block_bytes: int) -> int:
        """Where that block ends, and the next one begins; of -1 where the first one begins."""
        if self._ends is None or number < 0:
            return (number + 1) * block_bytes
        return self._ends[number]


@dataclass(frozen=True, slots=True)
class Read:
    """One request: blocks *first* to before *end* of a pack, and which of them go where."""

    pack: Pack
    first: int
    end: int
    wanted: tuple[tuple[int, int], ...]
    """Number of the block in the pack, position among the keys asked for."""


class PackTable:
    """The packs of one namespace. Its owner holds a lock around every method."""

    def __init__(self, block_bytes: int, capacity: int | None, ttl: float | None) -> None:
        self._block_bytes = block_bytes
        self._capacity = capacity
        self._ttl = ttl
        self._packs: dict[str, Pack] = {}
        self._where: dict[OffloadKey, Pack] = {}  # the last pack that names the key, notes among them
        self._earlier: dict[OffloadKey, list[Pack]] = {}  # the others that do
        self._was_there: dict[
            OffloadKey, bool
        ] = {}  # of those that changed, at the last call of take_changes
        self._next_to_go: list[tuple[Pack, float]] = []
        """The first to leave last, with the time of use as it was then: packs used since are passed over."""
        self.bytes = 0
        """Of all packs."""
        self._newest = 0
        """The newest stamp there was."""
        self._last_by_writer: dict[str, float] = {}
        """When each engine stored last, in seconds since the epoch."""

    def __len__(self) -> int:
        return len(self._packs)

    def __contains__(self, name: str) -> bool:
        return name in self._packs

    @property
    def names(self) -> list[str]:
        """Of all packs."""
        return list(self._packs)

    def next_stamp(self, now: float) -> int:
        """The stamp of a pack that is stored *now*: no other has it or a later one, as far as known here."""
        self._newest = min(max(self._newest + 1, int(now * 1000)), _LAST_STAMP)
        return self._newest

    def add(self, packs: Iterable[Pack]) -> None:
        """Enter packs; those that are there already are passed over."""
        for pack in packs:
            if pack.name.text in self._packs:
                continue
            self._packs[pack.name.text] = pack
            self.bytes += pack.name.bytes(self._block_bytes)
            self._newest = max(self._newest, pack.name.stamp)
            last_seen = self._last_by_writer.get(pack.name.writer, 0.0)
            self._last_by_writer[pack.name.writer] = max(last_seen, pack.name.stamp / 1000)
            for key in pack.keys:
                last = self._where.get(key)
                if last is None or last.name.text < pack.name.text:
                    self._put(key, pack)
                if last is not None:
                    self._earlier.setdefault(key, []).append(min(last, pack, key=_text))

    def drop(self, names: Iterable[str]) -> None:
        """Packs are gone. What a note had removed may be there again without it."""
        for name in names:
            pack = self._packs.pop(name, None)
            if pack is None:
                continue
            self.bytes -= pack.name.bytes(self._block_bytes)
            for key in pack.keys:
                others = self._earlier.pop(key, [])
                leaves = pack
                if self._where[key] is pack:
                    last = max(others, key=_text, default=None)
                    self._put(key, last)
                    leaves = last or pack
                if rest := [other for other in others if other is not leaves]:
                    self._earlier[key] = rest

    def _put(self, key: OffloadKey, pack: Pack | None) -> None:
        self._was_there.setdefault(key, self.find([key])[0])
        if pack is None:
            del self._where[key]
        else:
            self._where[key] = pack

    def take_changes(self) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """The blocks that are there now and were not at the last call, and those that are not there any more."""
        before, self._was_there = self._was_there, {}
        there = dict(zip(before, self.find(before), strict=True))
        appeared = [key for key, was in before.items() if there[key] and not was]
        return appeared, [key for key, was in before.items() if was and not there[key]]

    def find(self, keys: Iterable[OffloadKey]) -> list[bool]:
        """Which blocks are there."""
        found = map(self._where.get, keys)
        return [pack is not None and pack.name.blocks > 0 for pack in found]

    def use(self, keys: Iterable[OffloadKey], now: float) -> None:
        """These blocks are used at *now*."""
        for key in keys:
            pack = self._where.get(key)
            if pack is not None:
                pack.used = max(pack.used, now)
                pack.used_here = now

    def used_here(self, since: float) -> dict[str, float]:
        """The packs that this engine has used *since* then, and when."""
        return {name: pack.used_here for name, pack in self._packs.items() if pack.used_here >= since}

    def used_elsewhere(self, uses: Mapping[str, float]) -> None:
        """Other engines used these packs then; those that are not there are passed over."""
        for name, when in uses.items():
            if (pack := self._packs.get(name)) is not None:
                pack.used = max(pack.used, when)

    def plan(self, keys: Sequence[OffloadKey]) -> list[Read]:
        """What to read for *keys*: neighbours in one request. Absent blocks are left out."""
        wanted: dict[str, list[int]] = {}
        for position, key in enumerate(keys):
            pack = self._where.get(key)
            if pack is not None and pack.name.blocks:
                wanted.setdefault(pack.name.text, []).append(position)
        reads: list[Read] = []
        for name, positions in wanted.items():
            pack = self._packs[name]
            number_of = {key: number for number, key in enumerate(pack.keys)}
            runs = _runs(sorted((number_of[keys[position]], position) for position in positions))
            reads += [Read(pack, run[0][0], run[-1][0] + 1, tuple(run)) for run in runs]
        return reads

    def lacking(self, listed: Collection[str], begun: float) -> list[str]:
        """The packs that a listing of all, which began at *begun* on the monotonic clock, would have to name."""
        return [name for name, pack in self._packs.items() if name not in listed and pack.known < begun]

    def make_room(self, needed: int, now: float) -> list[Pack]:
        """The packs to remove so that *needed* bytes fit, the longest unused first; they are dropped.

        Of packs used in one minute the newest goes first: it holds the ends of prompts. In the minute before *now* it
        goes last: more of its prompt may be about to come. Notes stay, or what they remove would be there again for
        engines that start later.
        """
        going: list[Pack] = []
        while self._capacity is not None and self.bytes + needed > self._capacity:
            if not self._next_to_go:
                blocks = [pack for pack in self._packs.values() if pack.name.blocks]
                packs = sorted(blocks, key=partial(_order, now=now))
                self._next_to_go = [(pack, pack.used) for pack in reversed(packs)]
            if not self._next_to_go:
                break  # notes alone, which take next to nothing
            pack, used = self._next_to_go.pop()
            if pack.name.text in self._packs and pack.used == used:
                going.append(pack)
                self.drop([pack.name.text])
        return going

    def superseded(self) -> list[str]:
        """The packs of which no block counts any more: later packs name all their keys."""
        behind = {pack.name.text: pack for packs in self._earlier.values() for pack in packs}
        return [
            name
            for name, pack in behind.items()
            if pack.name.blocks and all(self._where[key] is not pack for key in pack.keys)
        ]

    def others_stored(self, writer: str, since: float) -> bool:
        """Whether an engine other than *writer* has stored a pack *since* then."""
        return any(seen >= since for other, seen in self._last_by_writer.items() if other != writer)

    def expired(self, now: float) -> list[str]:
        """The packs that are too old at *now*, and notes that have nothing left to say."""
        oldest = min((pack.name.text for pack in self._packs.values() if pack.name.blocks), default="~")
        return [
            name
            for name, pack in self._packs.items()
            if (not pack.name.blocks and name < oldest)
            or (self._ttl is not None and pack.name.stamp / 1000 + self._ttl <= now)
        ]


def _text(pack: Pack) -> str:
    return pack.name.text


def _order(pack: Pack, now: float) -> tuple[bool, float, int]:
    if pack.used > now - _MINUTE_S:
        return True, pack.used, pack.name.stamp
    return False, pack.used // _MINUTE_S, -pack.name.stamp


def _runs(blocks: Sequence[tuple[int, int]]) -> Iterable[list[tuple[int, int]]]:
    """*blocks*, in order, parted where too much lies between two of them."""
    run: list[tuple[int, int]] = []
    for block in blocks:
        if run and block[0] - run[-1][0] > _GAP + 1:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
