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
    count = _COUNT.pack(len(pairs))
    places = array("q", [place for _, place in pairs]).tobytes()
    lengths = bytes([len(key) for key, _ in pairs])
    return b"".join((count, places, lengths, *(key for key, _ in pairs)))


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
