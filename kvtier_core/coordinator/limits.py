"""The limits of one coordinator. Pure data."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """The coordinator's limits, in rows, seconds and threads. A limit with a default is no setting."""

    max_promotion_rows: int
    max_cascade_rows: int
    max_loading_rows: float = math.inf
    """Rows that loads from all tiers may hold, those that are overdue included."""
    max_pinned_rows: float = math.inf
    """Rows that hints may pin."""
    store_threshold: int = 1
    """Offers from which on the pool stores a block."""
    lease_timeout_s: float = 30.0
    """A row stays reserved for a request that has stopped asking: longer than any scheduler leaves a request alone."""
    device_timeout_s: float = 60.0
    """A device store counts as lost: a copy of the whole pool takes seconds."""
    check_threads: int = 2
    """Threads that check the proofs of rows that tiers on the hook specs loaded."""
    max_holds: int = 1_000
    """Hints that keep blocks at a time: when room is short, those to give way are sorted."""
    max_prefetches: int = 1_000
    """Prompts that wait to be brought from tiers at a time: each costs memory."""
    max_tracker_size: int = 64_000
    """Keys whose offers are counted: some MiB."""
    break_even_margin: float = 1.25
    """How much longer than computing the same tokens a load may take, as a factor: computing keeps others waiting."""
    break_even_probe_s: float = 10.0
    """How often a tier that is passed over gets a load all the same, to see whether it still is slow."""
    load_again_after_s: float = 10.0
    """A request does not ask again so soon for what it waited for in vain, or it would wait for ever."""
    presence_ttl_s: float = 5.0
    """A tier's answer about a key is believed so long, on top of the longest ``lookup_timeout``."""
    max_remembered: int = 100_000
    """Answers about keys, and keys that could not be loaded, remembered of a tier: some 10 MiB."""
    max_unanswered: int = 1_000
    """Overdue lookups, and stores, that a tier may leave unanswered before it gets no more: each costs memory."""
    max_late_blocks: int = 10_000
    """Blocks of request-level requests that wait for a tier that is behind: each costs memory."""
    breaker_failures: int = 3
    """Failures in a row after which a tier is out of the path: one may be chance."""
    breaker_pause_s: float = 1.0
    """The first pause; each following one is twice as long."""
    breaker_max_pause_s: float = 60.0
    """The longest pause: a tier that works again is back within a minute."""
