"""The tables of the index, and what their rows are in Python.

Pure: no connection is opened here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

VERSION = 2
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
    place INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, key BLOB, time REAL, owner INTEGER, used REAL,
    CHECK ((key IS NULL) = (time IS NULL)));
CREATE INDEX free_slots ON slots (namespace, place) WHERE key IS NULL AND owner IS NULL;
CREATE INDEX claimed_slots ON slots (owner) WHERE owner IS NOT NULL;
CREATE TABLE changes (
    number INTEGER PRIMARY KEY, count INTEGER NOT NULL, namespace INTEGER NOT NULL, owner INTEGER NOT NULL,
    stored INTEGER NOT NULL, pairs BLOB NOT NULL);
"""


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


def chunks(blocks: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """The blocks in parts of one transaction each."""
    for begin in range(0, len(blocks), CHUNK):
        yield blocks[begin : begin + CHUNK]
