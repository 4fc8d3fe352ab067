"""Counters of the deciding part. Pure; each only grows."""

from collections import Counter
from dataclasses import dataclass, field

from kvtier_core.values import MissReason


@dataclass
class JobTimes:
    """Jobs of one kind that ended in time, and their seconds until the engine saw the results: it looks once a step."""

    jobs: int = 0
    seconds: float = 0.0


@dataclass
class TierCounters:
    """One tier's counters, in blocks unless the name says otherwise."""

    stored: int = 0
    loaded: int = 0
    store_failed: int = 0
    load_failed: int = 0
    load_missing: int = 0
    dropped: int = 0
    """Cascades left out: the tier was behind, out of the path or at its limit."""
    made_up: int = 0
    """Blocks among ``dropped`` that it was given later, while it was idle and they were in the pool."""
    below_threshold: int = 0
    """Cascades left out: offered for storing less often than the tier's ``store_threshold``."""
    declined: int = 0
    """Blocks that the tier did not want."""
    passed_over: int = 0
    """Not loaded, because computing them is faster, once per request and key (C35)."""
    integrity: int = 0
    faults: int = 0
    timeouts: int = 0
    lookups: JobTimes = field(default_factory=JobTimes)
    loads: JobTimes = field(default_factory=JobTimes)
    stores: JobTimes = field(default_factory=JobTimes)


@dataclass
class Counters:
    """All counters of one coordinator."""

    hits: Counter[str] = field(default_factory=Counter)
    """Blocks handed to a device load, by where they came from: ``pool`` or a tier's name."""
    misses: Counter[MissReason] = field(default_factory=Counter)
    """Lookups that ended at a block, once per request and key."""
    device_stored: int = 0
    device_loaded: int = 0
    evicted: int = 0
    hints: Counter[str] = field(default_factory=Counter)
    """Hints of requests, by kind; ``unknown`` ones were not understood."""
    not_kept: int = 0
    """Blocks that a hint was to keep and that found no place: too much was pinned, or kept by too many hints."""
    below_threshold: int = 0
    """Blocks that the pool did not take: offered for storing less often than its ``store_threshold``."""
    tiers: dict[str, TierCounters] = field(default_factory=dict)
