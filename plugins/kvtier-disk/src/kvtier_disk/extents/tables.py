"""The tables of the index, what their rows are in Python, and how pairs of keys and places are packed into one value.

Pure: no connection is opened here.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier_core import OffloadKey
from kvtier_disk.extents.contents import Pair

VERSION = 1
CHUNK = 512
"""Pairs that one transaction handles at most, where there may be any number."""

SCHEMA = """
CREATE TABLE namespaces (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, row_bytes INTEGER NOT NULL, used REAL NOT NULL,
    UNIQUE (name, row_bytes));
CREATE TABLE owners (
    id INTEGER PRIMARY KEY AUTOINCREMENT, lock TEXT NOT NULL, namespace INTEGER NOT NULL);
CREATE TABLE extents (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL, bytes INTEGER NOT NULL,
    slots INTEGER NOT NULL, state INTEGER NOT NULL, owner INTEGER);
CREATE TABLE slots (
    place INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, key BLOB, time REAL, owner INTEGER);
CREATE INDEX free_slots ON slots (namespace, place) WHERE key IS NULL AND owner IS NULL;
CREATE INDEX claimed_slots ON slots (owner) WHERE owner IS NOT NULL;
CREATE TABLE changes (
    number INTEGER PRIMARY KEY, count INTEGER NOT NULL, namespace INTEGER NOT NULL, owner INTEGER NOT NULL,
    stored INTEGER NOT NULL, pairs BLOB NOT NULL);
"""
FIND_FREE = """
SELECT place FROM slots WHERE namespace = ? AND key IS NULL AND owner IS NULL ORDER BY place LIMIT ?"""

# One statement for a run of neighbouring slots, with the keys of their blocks in one piece: each row takes its own part
# of it. The plus keeps SQLite from going through all slots of the owner instead.
PUBLISH_RUN = """
UPDATE slots SET key = substr(:keys, (place - :first) * :width + 1, :width), time = :now, owner = NULL
WHERE place BETWEEN :first AND :last AND +owner = :owner RETURNING place"""
CLAIM_RUN = """
UPDATE slots SET key = NULL, time = NULL, owner = :owner
WHERE place BETWEEN :first AND :last AND key = substr(:keys, (place - :first) * :width + 1, :width) RETURNING place"""
FREE_RUN = """
UPDATE slots SET key = NULL, time = NULL
WHERE place BETWEEN :first AND :last AND key = substr(:keys, (place - :first) * :width + 1, :width) RETURNING place"""
_COUNT = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """One namespace with blocks of one size."""

    id: int
    name: str
    row_bytes: int


@dataclass(frozen=True, kw_only=True)
class ExtentRow:
    """One extent: whose it is, how large, and whether it is in use (not being made or removed)."""

    id: int
    namespace: int
    bytes: int
    slots: int
    is_ready: bool
    owner: int | None


def pack(pairs: Sequence[Pair]) -> bytes:
    """Pairs as one value of the table ``changes``."""
    keys, places = zip(*pairs, strict=True) if pairs else ((), ())
    return b"".join((_COUNT.pack(len(pairs)), array("q", places).tobytes(), bytes(map(len, keys)), *keys))


def unpack(packed: bytes) -> list[Pair]:
    """The inverse of ``pack``."""
    (count,) = _COUNT.unpack_from(packed)
    places = array("q", packed[_COUNT.size : _COUNT.size + 8 * count])
    at = _COUNT.size + 9 * count
    lengths = packed[at - count : at]
    pairs: list[Pair] = []
    for place, length in zip(places, lengths, strict=True):
        pairs.append((OffloadKey(packed[at : at + length]), place))
        at += length
    return pairs


def chunks(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    """The pairs in parts of one transaction each."""
    for begin in range(0, len(pairs), CHUNK):
        yield pairs[begin : begin + CHUNK]


def runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring places as (first, length); *places* are sorted."""
    first = length = 0
    for place in places:
        if length and place == first + length:
            length += 1
            continue
        if length:
            yield first, length
        first, length = place, 1
    if length:
        yield first, length


def key_runs(pairs: Sequence[Pair]) -> Iterator[tuple[int, list[OffloadKey]]]:
    """Neighbouring places whose keys are of one length, as (first place, keys); in order where *pairs* are sorted."""
    first, keys, width = 0, list[OffloadKey](), 0
    for key, place in pairs:
        if keys and place == first + len(keys) and len(key) == width:
            keys.append(key)
            continue
        if keys:
            yield first, keys
        first, keys, width = place, [key], len(key)
    if keys:
        yield first, keys
