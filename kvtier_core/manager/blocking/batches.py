"""Decides how much one call of a tier may move or delete. Pure; of lookups ``Pace`` decides."""

from kvtier_core.manager.blocking.work import Kind, Limit
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import TierContext, TierInfo

MAX_BATCH_BYTES = 4 << 20
"""Moved by one call, one block at least: more gains a disk nothing, and others wait for the call's end."""
KEYS_A_CALL = 256
"""Keys deleted in one call: enough to share its cost, few enough to stay quick."""
_TURNS = 10
"""Calls that each thread makes of a long queue at least: a newcomer waits for one, and for the one that it is in."""
_BLOCKS_A_STORE = 1024
"""Blocks stored in one call: what a tier writes down of them is one transaction, and others wait for its end."""
_STORED_AT_ONCE = 4
"""All threads together store at most one of so many parts of the tier at a time, where their calls are large."""


def batch_limits(
    info: TierInfo, settings: TierSettings, context: TierContext, *, batches: bool
) -> dict[Kind, Limit]:
    """How much goes into a call of a tier, which takes *batches* or block after block."""
    threads = settings.threads
    blocks = max(1, MAX_BATCH_BYTES // context.row_bytes) if batches else 1
    loads, stores = (info.load_batch, info.store_batch) if batches else (1, 1)
    most = min(blocks * stores, _BLOCKS_A_STORE)
    if context.capacity_bytes is not None:
        # What is being stored takes room and can't be evicted: all calls together leave most of the tier alone.
        share = context.capacity_bytes // context.row_bytes // (_STORED_AT_ONCE * threads)
        most = max(blocks, min(most, share))
    turns = _TURNS * threads
    limits = {
        Kind.LOAD: (blocks, blocks * loads, threads, turns),
        Kind.DELETE: (KEYS_A_CALL, KEYS_A_CALL, 1, None),
        Kind.MARK: (KEYS_A_CALL, KEYS_A_CALL, 1, None),
        Kind.STORE: (min(most, blocks * -(-stores // 4)), most, 2, None),
    }
    return {
        kind: Limit(at_least=least, most=most, shares=shares, turns=turns)
        for kind, (least, most, shares, turns) in limits.items()
    }
