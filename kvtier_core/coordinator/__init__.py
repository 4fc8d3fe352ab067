"""The deciding part: pure, events in, actions out."""

from kvtier_core.coordinator.actions import (
    Action,
    CancelJobs,
    SealRows,
    SubmitJob,
    TellNewRequest,
    TellRequestFinished,
    TellStepEnd,
    TellTouched,
)
from kvtier_core.coordinator.coordinator import Coordinator
from kvtier_core.coordinator.endpoints import GroupShape, is_prefix
from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.coordinator.results import Finished
from kvtier_core.coordinator.stats import Counters, TierCounters
from kvtier_core.coordinator.tier_record import TierSpec
from kvtier_core.values import Lookup, PreparedTransfer

__all__ = [
    "Action",
    "CancelJobs",
    "Coordinator",
    "Counters",
    "Finished",
    "GroupShape",
    "JobKind",
    "Lookup",
    "PoolLimits",
    "PreparedTransfer",
    "SealRows",
    "SubmitJob",
    "TellNewRequest",
    "TellRequestFinished",
    "TellStepEnd",
    "TellTouched",
    "TierCounters",
    "TierSpec",
    "is_prefix",
]
