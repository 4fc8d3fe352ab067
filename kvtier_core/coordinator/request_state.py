"""One request as the coordinator knows it. Pure data."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvtier_core.coordinator.holds import Hold
from kvtier_core.keys import OffloadKey
from kvtier_core.values import Lookup, MissReason, RequestInfo


@dataclass(slots=True)
class Pending:
    """A pending answer, and what may change it (``State.is_pending``)."""

    asked: tuple[tuple[OffloadKey, ...], ...]
    answer: Lookup
    events: Collection[int]
    """The numbers of the jobs whose ends it waits for, and of a departure of promotions (``State.departure``)."""
    promised: int
    """How many blocks the request was promised then. One that a tier takes back changes the answer."""
    unsure: Sequence[OffloadKey]
    """Keys that no tier has told of yet; the pool may get them meanwhile."""
    seen: int
    """``State.changes`` when it was last looked at."""


@dataclass(eq=False, slots=True)
class RequestState:
    """One request from ``new_request`` to the last block that a tier may still get of it."""

    info: RequestInfo
    load_tiers: Collection[str] | None
    store_tiers: Collection[str] | None
    last_lookup: float
    leases: set[OffloadKey] = field(default_factory=set)
    """The keys promised to it."""
    promised: list[OffloadKey] = field(default_factory=list)
    """All of them, and some that were promised earlier, in the order of the promises."""
    offered: set[OffloadKey] = field(default_factory=set)
    """Keys whose offer counts for admission already."""
    depth: int = 0
    """``Entry.depth`` of the next block that it offers. Depths of blocks that it reads are below zero."""
    read: int = 0
    """How many blocks it has loaded or given back, which sets the depth of the next."""
    used: set[OffloadKey] = field(default_factory=set)
    """Keys whose use by this request has been counted."""
    promoting: int = 0
    """Tier loads under way for this request."""
    patience: dict[str, float] = field(default_factory=dict)
    """By tier: how many seconds its blocks that are planned for this request are worth waiting for (C35)."""
    wait_until: float | None = None
    """When lookups stop waiting for tiers to say what they hold; set while one is waiting."""
    is_nowhere: bool = False
    """Its last lookup ended at a key in no tier: what it computes from there on is in none either."""
    device_stores: int = 0
    """Device stores under way for this request."""
    waited: set[OffloadKey] = field(default_factory=set)
    """Keys that a promotion brought while this request waited for them."""
    not_loaded: dict[str, dict[OffloadKey, tuple[float, MissReason]]] = field(default_factory=dict)
    """By tier: keys that it waited for in vain, and until when it leaves them alone."""
    passed_over: set[OffloadKey] = field(default_factory=set)
    """Keys counted as passed over."""
    missed: dict[OffloadKey, MissReason] = field(default_factory=dict)
    """Keys whose miss has been counted, and why each missed last."""
    pending: Pending | None = None
    """The answer of its last lookup, while that is pending."""
    cascaded: list[tuple[str, Sequence[OffloadKey]]] = field(default_factory=list)
    """Keys of each store job of this epoch, and its tier."""
    whole: dict[str, dict[OffloadKey, bool]] = field(default_factory=dict)
    """By tier that gets the whole request: each key offered, and whether the tier was or will be given it."""
    late: int = 0
    """Blocks that such tiers get later: those on their way into the pool, or waiting for a tier that is behind."""
    holds: Sequence[Hold] = ()
    """What its hints keep in the pool."""
    to_drop: dict[OffloadKey, None] = field(default_factory=dict)
    """What it has stored and nobody will need again."""
    may_store: bool = True
    """False from a reset or a preemption until it begins again."""
    finished: bool = False

    def waits_for(self, event: int) -> bool:
        """Whether its last answer waits for this job, or departure."""
        return self.pending is not None and event in self.pending.events

    def be_patient(self, tier: str, seconds: float) -> None:
        """More blocks are planned from *tier*, which are worth waiting for so long."""
        self.patience[tier] = max(seconds, self.patience.get(tier, 0.0))

    def deepen(self, count: int) -> range:
        """The depths of the next *count* blocks that it offers, in prompt order: no two of them are equal."""
        first = self.depth
        self.depth += count
        return range(first, self.depth)

    def may_store_to(self, tier: str) -> bool:
        """Whether the request's filter lets its blocks go to *tier* (C27)."""
        return self.store_tiers is None or tier in self.store_tiers

    def may_load_from(self, tier: str) -> bool:
        """Whether the request's filter lets its blocks come from *tier* (C27)."""
        return self.load_tiers is None or tier in self.load_tiers
