"""The figures of a session, as plain values."""

from collections.abc import Mapping
from typing import Any

from kvtier_core.manager.manager import TierManager


def describe(manager: TierManager, row_bytes: int, hit_tokens: Mapping[str, int]) -> dict[str, Any]:
    """Counters since the start, and each tier's state, ready for JSON."""
    counters = manager.counters
    ledger = manager.coordinator.state.ledger
    return {
        "pool": {
            "rows": ledger.num_rows,
            "free_rows": ledger.num_free,
            "detached_rows": ledger.num_detached,
            "row_bytes": row_bytes,
            "evicted_blocks": counters.evicted,
            "below_threshold_blocks": counters.below_threshold,
            "stored_blocks": counters.device_stored,
            "loaded_blocks": counters.device_loaded,
        },
        "hit_tokens": dict(hit_tokens),
        "misses": {reason.value: n for reason, n in counters.misses.items()},
        "tiers": {
            name: {**state, **_tier_figures(manager, name, row_bytes)}
            for name, state in manager.describe_tiers().items()
        },
    }


def _tier_figures(manager: TierManager, name: str, row_bytes: int) -> dict[str, float]:
    counted = manager.counters.tiers[name]
    return {
        "stored_blocks": counted.stored,
        "loaded_blocks": counted.loaded,
        "stored_bytes": counted.stored * row_bytes,
        "loaded_bytes": counted.loaded * row_bytes,
        "store_failed_blocks": counted.store_failed,
        "load_failed_blocks": counted.load_failed,
        "load_missing_blocks": counted.load_missing,
        "dropped_blocks": counted.dropped,
        "made_up_blocks": counted.made_up,
        "below_threshold_blocks": counted.below_threshold,
        "declined_blocks": counted.declined,
        "passed_over_blocks": counted.passed_over,
        "integrity_misses": counted.integrity,
        "faults": counted.faults,
        "timeouts": counted.timeouts,
        "lookup_jobs": counted.lookups.jobs,
        "lookup_job_seconds": counted.lookups.seconds,
        "load_jobs": counted.loads.jobs,
        "load_job_seconds": counted.loads.seconds,
        "store_jobs": counted.stores.jobs,
        "store_job_seconds": counted.stores.seconds,
    }
