"""End points: up to which token a prompt can be loaded, when several KV groups must agree on it. Pure arithmetic.

A group of full attention needs every block before the end point, one of a sliding window only those that cover the
last tokens before it. All groups end at the same token, on a block boundary of each. Nothing here knows tiers, rows
or time.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How one group's blocks cover the tokens, and how many of them an end point needs.

    ``window`` is the number of tokens before the end point that the group needs, ``None`` for all of them.
    """

    tokens_per_block: int = 1
    window: int | None = None

    def needed(self, end: int) -> range:
        """The blocks that the end point *end*, a multiple of ``tokens_per_block``, needs."""
        first = 0 if self.window is None else max(0, end - self.window) // self.tokens_per_block
        return range(first, end // self.tokens_per_block)


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """One group's blocks, in order: which can't be had, and how many rows each would take of the pool's room."""

    shape: GroupShape
    blocked: Sequence[bool]  # (blocks,)
    rows: Sequence[int]  # (blocks,)


def is_prefix(shapes: Sequence[GroupShape]) -> bool:
    """Whether there is one group, of full attention: then what can be loaded is a prefix of its blocks."""
    return len(shapes) == 1 and shapes[0].window is None


def unit_of(shapes: Sequence[GroupShape]) -> int:
    """Tokens between two end points that are block boundaries of every group."""
    return math.lcm(*(shape.tokens_per_block for shape in shapes))


def last_candidate(groups: Sequence[GroupCosts]) -> int:
    """The last end point for which every group has blocks."""
    unit = unit_of([group.shape for group in groups])
    most = min(len(group.blocked) * group.shape.tokens_per_block for group in groups)
    return most // unit * unit


def find_end(groups: Sequence[GroupCosts], room: int) -> int:
    """The longest end point whose blocks can be had and together fit into *room* rows.

    0 when there is none. Cost: proportional to the blocks.
    """
    return next(find_ends(groups, room), 0)


def find_ends(groups: Sequence[GroupCosts], room: int) -> Iterator[int]:
    """All such end points but 0, the longest first."""
    unit = unit_of([group.shape for group in groups])
    end = last_candidate(groups)
    for group in groups:
        if group.shape.window is None and True in group.blocked:
            end = min(end, group.blocked.index(True) * group.shape.tokens_per_block // unit * unit)
    sums = [
        (
            group.shape,
            list(accumulate(group.blocked, initial=0)),  # (blocks + 1,)
            list(accumulate(group.rows, initial=0)),  # (blocks + 1,)
        )
        for group in groups
    ]
    while end:
        rows = 0
        for shape, blocked, taken in sums:
            needed = shape.needed(end)
            if blocked[needed.stop] - blocked[needed.start]:
                break
            rows += taken[needed.stop] - taken[needed.start]
        else:
            if rows <= room:
                yield end
        end -= unit
