"""What leaves the pool leaves from the ends of chains (C14). It looks at the core's policies and changes nothing.

Of a chain that lies in two orders of a policy (used blocks in one, unused in the other) each part counts by itself.
Blocks don't count that lost their rank because they were in use when they were met, nor those whose use the policy has
not taken notice of: S3-FIFO leaves them where they are until they come to the end of their queue, and puts them in
their place of the chain then.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Block, Ledger
from tests.sim.hook_order import InvariantError


def standing(ledger: Ledger, keep: Collection[OffloadKey]) -> Mapping[OffloadKey, tuple[int, int, Any]]:
    """The chain, depth and order of each block, but for *keep*, that could leave and has its place in its chain."""
    return {
        block.key: (block.chain, block.depth, block.place.order)
        for block in ledger.blocks
        if block.key not in keep and ledger.is_idle(block) and _is_in_chain(block)
    }


def _is_in_chain(block: Block) -> bool:
    return (
        block.chain > 0 and block.uses == 0 and block.place is not None and block.place.chain == block.chain
    )


def check_left(
    before: Mapping[OffloadKey, tuple[int, int, Any]], ledger: Ledger, evicted: Collection[OffloadKey]
) -> bool:
    """Of no chain a block was *evicted* while a deeper one, which stood there *before*, could have left.

    Raises ``InvariantError``. Returns whether a chain lost its end and kept its beginning.
    """
    left: dict[tuple[int, int], int] = {}  # the least deep that left of each part
    for key in evicted:
        if key in before:
            chain, depth, order = before[key]
            part = chain, id(order)
            left[part] = min(depth, left.get(part, depth))
    has_kept = False
    for block in ledger.blocks:
        if block.key not in before or not ledger.is_idle(block) or not _is_in_chain(block):
            continue
        order = before[block.key][2]
        least = left.get((block.chain, id(order)))
        if least is None or block.place.order is not order:  # it went on from one order to the other
            continue
        if block.depth > least:
            raise InvariantError(
                f"a block at {least} of chain {block.chain} left before {block} at {block.depth} (C14)"
            )
        has_kept = True
    return has_kept
