"""How runs of neighbouring slots change hands in the index: a statement for each run, whatever its length.

Works inside transactions that ``Index`` begins and ends. Decides nothing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter

from kvtier_core.tier import OffloadKey
from kvtier_disk.extents.contents import Pair
from kvtier_disk.extents.statements import Statements

_FIND_FREE = """
SELECT place FROM slots WHERE namespace = ? AND key IS NULL AND owner IS NULL ORDER BY place LIMIT ?"""

# One statement for a run of neighbouring slots, with the keys of their blocks in one piece: each row takes its own part
# of it. It changes the whole run or, where one slot is not what it should be, nothing: counting first takes half the
# time of letting it return what it has changed. A plus keeps SQLite from using an index of slots instead of the table.
_TAKE_RUN = """
UPDATE slots SET owner = :owner
WHERE place BETWEEN :first AND :last AND +namespace = :namespace AND +key IS NULL AND +owner IS NULL"""
PUBLISH_RUN = """
UPDATE slots SET key = substr(:keys, (place - :first) * :width + 1, :width), time = :now, used = NULL, owner = NULL
WHERE place BETWEEN :first AND :last AND :last - :first + 1 =
    (SELECT count(*) FROM slots WHERE place BETWEEN :first AND :last AND +owner = :owner)"""
CLAIM_RUN = """
UPDATE slots SET key = NULL, time = NULL, owner = :owner
WHERE place BETWEEN :first AND :last AND :last - :first + 1 =
    (SELECT count(*) FROM slots
     WHERE place BETWEEN :first AND :last AND key = substr(:keys, (place - :first) * :width + 1, :width))"""
FREE_RUN = """
UPDATE slots SET key = NULL, time = NULL
WHERE place BETWEEN :first AND :last AND :last - :first + 1 =
    (SELECT count(*) FROM slots
     WHERE place BETWEEN :first AND :last AND key = substr(:keys, (place - :first) * :width + 1, :width))"""


def take_free(connection: Statements, namespace: int, owner: int, count: int) -> list[int]:
    """Make up to *count* free slots of *namespace* the owner's; returns their places, in order.

    Which slots are free is told by an index of the table. One that tells otherwise than the table is damaged: slots
    that are not there, or hold blocks, would be claimed in vain for ever.
    """
    places = [place for (place,) in connection.execute(_FIND_FREE, (namespace, count))]
    for first, length in runs(places):
        run = {"first": first, "last": first + length - 1, "namespace": namespace, "owner": owner}
        if connection.execute(_TAKE_RUN, run).rowcount != length:
            raise connection.damaged("slots are called free that are not")
    return places


def change(connection: Statements, statement: str, pairs: Sequence[Pair], **values: float) -> list[int]:
    """Let *statement* change the slots of *pairs*, run by run; returns the places of those that it did change.

    Cheap where *pairs* are sorted by place.
    """
    changed: list[int] = []
    for first, keys in key_runs(pairs):
        if _change_run(connection, statement, first, keys, values):
            changed += range(first, first + len(keys))
        elif len(keys) > 1:
            changed += [
                place
                for place, key in enumerate(keys, first)
                if _change_run(connection, statement, place, [key], values)
            ]
    return changed


def _change_run(
    connection: Statements,
    statement: str,
    first: int,
    keys: Sequence[OffloadKey],
    values: Mapping[str, float],
) -> bool:
    """Whether *statement* changed the slots from *first* on, for blocks under *keys*: all of them, or none."""
    run: dict[str, float | bytes] = {
        "first": first,
        "last": first + len(keys) - 1,
        "keys": b"".join(keys),
        "width": len(keys[0]),
    }
    changed = connection.execute(statement, {**run, **values}).rowcount
    if changed not in (0, len(keys)):
        raise connection.damaged(f"{changed} of a run of {len(keys)} slots were changed")
    return changed > 0


def pairs_at(connection: Statements, places: Sequence[int], since: float) -> set[Pair]:
    """What blocks *places*, which are sorted, hold, of those stored *since*."""
    return {
        (OffloadKey(key), place)
        for first, length in runs(places)
        for key, place in connection.execute(
            "SELECT key, place FROM slots WHERE place BETWEEN ? AND ? AND key IS NOT NULL AND time >= ?",
            (first, first + length - 1, since),
        )
    }


def lowest_held(
    connection: Statements, places: Mapping[OffloadKey, Collection[int]]
) -> tuple[list[Pair], list[Pair]]:
    """Of the *places* of each key that hold its block, the lowest; and all others, in order."""
    asked = sorted({place for those in places.values() for place in those})
    lowest: dict[OffloadKey, int] = {}
    others: list[Pair] = []
    for key, place in sorted(pairs_at(connection, asked, float("-inf")), key=itemgetter(1)):
        if place in places.get(key, ()) and lowest.setdefault(key, place) != place:
            others.append((key, place))
    return list(lowest.items()), others


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
