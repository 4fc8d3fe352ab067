"""What the self-test moves: rounds of a store and a load, each with other blocks and rows. Pure."""

import random

from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.layout import KVLayout
from kvtier_core.transfer.plan import GroupTransfer

SELF_TEST_JOBS = 7
"""Transfers of each direction, whatever the layout: a scheduler counts on from there."""
_ROUND_BYTES = 8 << 20
_ROUND_PAGES = 256
"""The test writes, reads and restores each page by a few small copies, which have to be through in a second."""
_MOST_BLOCKS = 8

Parts = dict[Direction, list[GroupTransfer]]


class SelfTestError(Exception):
    """A device copies wrong bytes, fails, or can't be tested. The message says which byte of what, and what to do."""


def plan_rounds(layout: KVLayout, rows: range, row_bytes: int) -> list[Parts]:
    """What each round stores and loads: other blocks and rows every time, the far ones of large memory first.

    No block id occurs twice in a round, for groups may share memory. Raises ``SelfTestError`` where there is no room
    for all groups in both directions.
    """
    chance = random.Random(0)  # noqa: S311 - the same blocks at every start
    factor = layout.block_size_factor
    tensors = sum(len(group.tensors) for group in layout.groups)
    slot_bytes = sum(group.slot_bytes for group in layout.groups)
    most = max(1, min(_MOST_BLOCKS, _ROUND_BYTES // slot_bytes, _ROUND_PAGES // (2 * tensors)))
    blocks = [
        _Spots(range(group.num_blocks), max(t.stride(0) * t.element_size() for t in group.tensors), chance)
        for group in layout.groups
    ]
    places = _Spots(rows, row_bytes, chance)
    units = [(direction, group) for group in range(len(layout.groups)) for direction in Direction]
    tried = set()
    rounds = []
    for number in range(SELF_TEST_JOBS):
        first_slot = -number % factor
        parts: Parts = {direction: [] for direction in Direction}
        taken_blocks: set[int] = set()
        taken_rows: set[int] = set()
        for direction, group in units:
            found = places.take(-(-(first_slot + most) // factor), taken_rows, len(units))
            room = len(found) * factor - first_slot
            ids = blocks[group].take(min(most, room), taken_blocks, len(units)) if found else []
            if not ids:
                continue
            found = found[: -(-(first_slot + len(ids)) // factor)]
            tried.add((direction, group))
            if number % 2:  # neighbours move one by one now
                ids.reverse()
            parts[direction].append(
                GroupTransfer(group=group, block_ids=ids, rows=found, first_slot=first_slot)
            )
        units = units[1:] + units[:1]  # in a small pool each comes first once
        rounds.append(parts)
    if missing := [f"a {d.value} of KV group {g}" for d, g in units if (d, g) not in tried]:
        raise SelfTestError(
            f"there is no room to test {missing[0]}: {len(rows)} rows are this worker's share of the pool; raise "
            "pool.capacity"
        )
    return rounds


class _Spots:
    """Indices into memory, each used before one comes again."""

    def __init__(self, indices: range, stride: int, chance: random.Random) -> None:
        """Around every power of two of bytes from 2**31 on, both ends, and random ones; always with a neighbour."""
        first, end = indices.start, indices.stop
        powers = range(31, (end * stride).bit_length())
        pairs = [-(-(1 << power) // stride) for power in reversed(powers)]
        pairs += [first + 1, end - 1, *chance.sample(indices, min(len(indices), 64))]
        spots = [spot for at in pairs for spot in (at - 1, at) if spot in indices]
        self._spots = list(dict.fromkeys(spots))

    def take(self, count: int, taken: set[int], sharers: int) -> list[int]:
        """At most *count* that are not in *taken*, and of few only a part of 1 / *sharers*; ascending. Now they are."""
        count = min(count, max(1, len(self._spots) // sharers))
        found = [spot for spot in self._spots if spot not in taken][:count]
        self._spots = [spot for spot in self._spots if spot not in found] + found
        taken.update(found)
        return sorted(found)
