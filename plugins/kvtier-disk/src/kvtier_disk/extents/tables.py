"""The tables of the index, and what their rows are in Python.

Decides nothing; opens no connection.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier_disk.extents.form import Shape
from kvtier_disk.extents.statements import Statements

_T = TypeVar("_T")

VERSION = 2
CHUNK = 512
"""Pairs that one transaction handles at most, where there may be any number."""

READY = 1
"""The state of an extent that can be used. Another is being made (0), or is leaving (2)."""
_EXTENTS = """
SELECT id, namespace, bytes, slots, state, owner,
    (SELECT row_bytes FROM namespaces WHERE id = extents.namespace) AS block FROM extents"""

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


def read_extents(connection: Statements) -> list[ExtentRow]:
    """All extents. What is counted, and removed, by them has to be right: each is as large as its slots make it."""
    extents: list[ExtentRow] = []
    for id_, namespace, size, slots, state, owner, row_bytes in connection.execute(_EXTENTS):
        if row_bytes is None:
            raise connection.damaged(f"extent {id_} is in no namespace")
        if size != Shape(row_bytes=row_bytes, slots=slots).file_bytes:
            raise connection.damaged(f"extent {id_} can't have {size} bytes with {slots} slots")
        extents.append(
            ExtentRow(
                id=id_,
                namespace=namespace,
                bytes=size,
                slots=slots,
                is_ready=state == READY,
                owner=owner,
            )
        )
    return extents


def chunks(blocks: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """The blocks in parts of one transaction each."""
    for begin in range(0, len(blocks), CHUNK):
        yield blocks[begin : begin + CHUNK]
