"""The figures of a manager, as plain values ready for JSON."""

from collections.abc import Mapping
from typing import Any

from kvtier_core.coordinator.coordinator import Coordinator
from kvtier_core.coordinator.tier_record import TierRecord
from kvtier_core.manager.port import TierPort


def figures(coordinator: Coordinator, ports: Mapping[str, TierPort], row_bytes: int) -> dict[str, Any]:
    """Counters since the start, and each tier's place in the path: whether it serves, its breakers' state."""
    counters, ledger = coordinator.counters, coordinator.state.ledger
    return {
        "pool": {
            "rows": ledger.num_rows,
            "free_rows": ledger.num_free,
            "detached_rows": ledger.num_detached,
            "row_bytes": row_bytes,
            "held_rows": len(coordinator.state.holds),
            "pinned_rows": coordinator.state.holds.num_pinned,
            "not_kept_blocks": counters.not_kept,
            "evicted_blocks": counters.evicted,
            "below_threshold_blocks": counters.below_threshold,
            "stored_blocks": counters.device_stored,
            "loaded_blocks": counters.device_loaded,
        },
        "hit_blocks": dict(counters.hits),
        "misses": {reason.value: n for reason, n in counters.misses.items()},
        "hints": dict(counters.hints),
        "tiers": {
            name: {"identity": str(ports[name].identity), **_of_tier(tier, row_bytes)}
            for name, tier in coordinator.state.tiers.items()
        },
    }


def _of_tier(tier: TierRecord, row_bytes: int) -> dict[str, Any]:
    counted = tier.counters
    return {
        "serving": tier.serving,
        "lookups": tier.lookups.breaker.state.value,
        "loads": tier.loads.breaker.state.value,
        "stores": tier.stores.breaker.state.value,
        "quarantined_rows": tier.quarantined_rows,
        "unanswered_lookups": tier.lookups.unanswered,
        "unanswered_stores": tier.stores.unanswered,
        "expected_load_seconds": tier.load_times.describe(),
        "passed_over": tier.probe_at is not None,
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
        "lookup_seconds": counted.lookups.seconds,
        "load_jobs": counted.loads.jobs,
        "load_seconds": counted.loads.seconds,
        "store_jobs": counted.stores.jobs,
        "store_seconds": counted.stores.seconds,
    }
