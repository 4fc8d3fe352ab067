"""What the processes of a root tell one another through the index: which blocks were stored and which removed.

Works inside transactions that ``Index`` begins and ends. Decides how many changes are kept; who has missed some learns
everything anew.
"""

import struct
from array import array
from collections.abc import Sequence

from kvtier_core.tier import OffloadKey
from kvtier_disk.extents.contents import Pair
from kvtier_disk.extents.form import MAX_KEY_BYTES
from kvtier_disk.extents.statements import Statements

_MIN_CHANGES = 256
_COUNT = struct.Struct("<I")


class ChangeLog:
    """The table ``changes``. Numbers count blocks, so that a bound on them bounds the bytes."""

    def __init__(self) -> None:
        self._unpruned = 0
        self._prune_at = _MIN_CHANGES // 2

    def record(
        self,
        connection: Statements,
        namespace: int,
        owner: int,
        *,
        stored: bool,
        pairs: Sequence[Pair],
    ) -> None:
        """Note a change for other processes."""
        if not pairs:
            return
        connection.execute(
            "INSERT INTO changes VALUES ((SELECT ifnull(max(number), 0) FROM changes) + ?1, ?1, ?, ?, ?, ?)",
            (len(pairs), namespace, owner, stored, pack(pairs)),
        )
        self._unpruned += len(pairs)
        if self._unpruned >= self._prune_at:
            self._prune(connection)

    def _prune(self, connection: Statements) -> None:
        """Keep about as many changes as a quarter of what there are slots; the last one always."""
        (slots,) = connection.execute("SELECT total(slots) FROM extents").fetchone()
        kept = max(_MIN_CHANGES, int(slots) // 4)
        # Whether the root has grown or shrunk since is seen then: a look at all extents a batch would cost more.
        self._prune_at = max(_MIN_CHANGES // 2, kept // 8)
        if self._unpruned >= self._prune_at:
            self._unpruned = 0
            connection.execute(
                "DELETE FROM changes WHERE number < (SELECT max(number) FROM changes) - ?", (kept,)
            )

    @staticmethod
    def last(connection: Statements) -> int:
        """The number of the last change."""
        number: int = connection.execute("SELECT ifnull(max(number), 0) AS number FROM changes").fetchone()[0]
        return number

    @classmethod
    def since(
        cls, connection: Statements, number: int, namespace: int, owner: int
    ) -> tuple[int, list[tuple[bool, list[Pair]]]] | None:
        """The last change, and all since *number* in order, or none where *owner* made them all; ``None`` if lost.

        With its own changes: a slot that another freed may hold the same block again, by this process.
        """
        last = cls.last(connection)
        if last == number:
            return last, []
        first = connection.execute(
            "SELECT number - count + 1 AS number FROM changes ORDER BY number LIMIT 1"
        ).fetchone()
        if last < number or first is None or first[0] > number + 1:
            return None
        by_others = connection.execute(
            "SELECT 1 FROM changes WHERE number > ? AND namespace = ? AND owner <> ? LIMIT 1",
            (number, namespace, owner),
        ).fetchone()
        if not by_others:
            return last, []
        rows = connection.execute(
            "SELECT stored, pairs FROM changes WHERE number > ? AND namespace = ? ORDER BY number",
            (number, namespace),
        ).fetchall()
        try:
            return last, [(bool(stored), unpack(pairs)) for stored, pairs in rows]
        except ValueError as error:
            raise connection.damaged(f"a change that can't be read: {error}") from error


def pack(pairs: Sequence[Pair]) -> bytes:
    """Pairs as one value of the table ``changes``."""
    keys, places = zip(*pairs, strict=True) if pairs else ((), ())
    return b"".join((_COUNT.pack(len(pairs)), array("q", places).tobytes(), bytes(map(len, keys)), *keys))


def unpack(packed: bytes) -> list[Pair]:
    """The inverse of ``pack``. Raises ``ValueError`` for what ``pack`` never gives."""
    count = int.from_bytes(packed[: _COUNT.size], "little")
    at = _COUNT.size + 9 * count
    lengths = packed[at - count : at]
    if len(packed) != at + sum(lengths) or not all(0 < length <= MAX_KEY_BYTES for length in lengths):
        raise ValueError(f"{len(packed)} bytes are not those of {count} blocks")
    places = array("q", packed[_COUNT.size : _COUNT.size + 8 * count])
    if count and min(places) < 0:
        raise ValueError("a place below 0")
    pairs: list[Pair] = []
    for place, length in zip(places, lengths, strict=True):
        pairs.append((OffloadKey(packed[at : at + length]), place))
        at += length
    return pairs
