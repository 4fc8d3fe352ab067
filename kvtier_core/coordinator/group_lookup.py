"""One KV group in one lookup: its keys, what the pool and the tiers hold of them, and what an end point would take."""

from collections.abc import Callable, Sequence

from kvtier_core.coordinator.endpoints import GroupCosts, GroupShape
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Block
from kvtier_core.values import MissReason

Verdict = str | MissReason | None
"""The tier to load a key from, why there is none, or ``None`` while a tier has not said."""


class GroupLookup:
    """One group's keys from the prompt's beginning, and what is found out about each in the course of a lookup."""

    __slots__ = ("blocks", "costs", "keys", "shape", "verdicts")

    def __init__(self, shape: GroupShape, keys: Sequence[OffloadKey], blocks: Sequence[Block | None]) -> None:
        self.shape = shape
        self.keys = keys
        self.blocks = blocks
        """The pool's block of each key, arriving or ready."""
        self.verdicts: list[Verdict] = []
        """The tiers' verdict on each key that the pool does not hold; ``None`` for the others."""
        self.costs = GroupCosts(shape, (), ())

    def end_at_first_doubt(self) -> None:
        """Leave out what lies behind the first key that can't be promoted now: a prefix ends there, or waits."""
        for index, (block, verdict) in enumerate(zip(self.blocks, self.verdicts, strict=True)):
            if block is None and not isinstance(verdict, str):
                self.keys = self.keys[: index + 1]
                self.blocks = self.blocks[: index + 1]
                self.verdicts = self.verdicts[: index + 1]
                return

    def count_rows(self, is_idle: Callable[[Block], bool]) -> int:
        """The rows that all of it would take: of blocks that may leave, and of those that a tier may have."""
        return sum(
            not isinstance(verdict, MissReason) if block is None else is_idle(block)
            for block, verdict in zip(self.blocks, self.verdicts, strict=True)
        )

    def count_costs(self, is_idle: Callable[[Block], bool]) -> None:
        """Work out ``costs`` from blocks and verdicts: a key that no tier has denied yet may be had."""
        blocked = [isinstance(verdict, MissReason) for verdict in self.verdicts]
        rows = [1 if block is None or is_idle(block) else 0 for block in self.blocks]
        self.costs = GroupCosts(self.shape, blocked, rows)

    def costs_without(self, tier: str) -> GroupCosts:
        """The costs if *tier* held nothing."""
        blocked = [
            no or verdict == tier for no, verdict in zip(self.costs.blocked, self.verdicts, strict=True)
        ]
        return GroupCosts(self.shape, blocked, self.costs.rows)
