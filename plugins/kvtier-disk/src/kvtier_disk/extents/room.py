"""Where room for a block comes from, and what has to go when there is too much. Decides; does nothing itself.

Pure: what there is comes in as a ``Census``. The order: a new extent while the capacity and the free-space floor
allow it; then a whole extent of a namespace that nobody has used for a while, the least recently used first, so that
dead model revisions and old epochs don't fill the disk; then, between namespaces in use, an extent of one that holds
clearly more; then single blocks of the namespace itself, by its eviction policy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

IDLE_AFTER_S = 60.0
"""A namespace not used for so long gives up its extents before any block of a used one goes."""


@dataclass(frozen=True, kw_only=True)
class ExtentInfo:
    """One extent as the index has it. *is_busy*: somebody is writing into it, or it is on its way."""

    id: int
    namespace: int
    bytes: int
    is_busy: bool
    index_bytes: int = 0
    """What its slots may take in the index."""


@dataclass(frozen=True, kw_only=True)
class Census:
    """What a root holds at one moment. ``used`` is when each namespace was last used, in seconds since the epoch."""

    extents: Sequence[ExtentInfo]
    used: Mapping[int, float]
    other_bytes: int
    """What the journal may take, the index without slots, and whatever else is no extent."""
    slack_bytes: int = 0
    """What the index's file takes beyond that: it does not shrink by itself when there is less to hold."""

    def bytes_by_namespace(self) -> Counter[int]:
        """What each namespace's extents take."""
        totals: Counter[int] = Counter()
        for extent in self.extents:
            totals[extent.namespace] += extent.bytes
        return totals

    @property
    def total_bytes(self) -> int:
        """What all of the root takes, at most."""
        return self.needed_bytes + self.slack_bytes

    @property
    def needed_bytes(self) -> int:
        """What it would take if the index were compact."""
        return self.other_bytes + sum(extent.bytes + extent.index_bytes for extent in self.extents)

    def wants_compact(self, limits: "Limits") -> bool:
        """Whether the root would fit its capacity with a compact index, and doesn't fit it now."""
        return limits.capacity is not None and self.needed_bytes <= limits.capacity < self.total_bytes

    def takeable(self) -> Iterable[ExtentInfo]:
        """The extents that nobody is writing into, oldest first."""
        return sorted((extent for extent in self.extents if not extent.is_busy), key=lambda extent: extent.id)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a root may take. ``None`` means without bound."""

    capacity: int | None
    free_bytes: int
    """What the file system has left."""
    min_free: int


@dataclass(frozen=True)
class Grow:
    """Make a new extent."""


@dataclass(frozen=True)
class Take:
    """Remove these extents, then decide anew."""

    extents: tuple[int, ...]


@dataclass(frozen=True)
class Recycle:
    """Evict blocks of the namespace itself."""


def find_room(census: Census, limits: Limits, mine: int, new_bytes: int, now: float) -> Grow | Take | Recycle:
    """How *mine* gets room for more blocks; *new_bytes* is the size of a new extent and what comes with it."""
    fits = limits.capacity is None or census.total_bytes + new_bytes <= limits.capacity
    if fits and limits.free_bytes - new_bytes >= limits.min_free:
        return Grow()
    victim = _idle_extent(census, mine, now) or _unfair_extent(census, mine, new_bytes)
    return Recycle() if victim is None else Take((victim.id,))


def surplus(census: Census, limits: Limits, mine: int) -> tuple[int, ...]:
    """The extents that have to go so that the limits hold, the least recently used namespace's first.

    None goes for what a compact index would not take.
    """
    excess = max(
        0 if limits.capacity is None else census.needed_bytes - limits.capacity,
        limits.min_free - limits.free_bytes,
    )
    by_use = sorted(
        census.takeable(),
        key=lambda extent: (extent.namespace == mine, census.used.get(extent.namespace, 0.0), extent.id),
    )
    going: list[int] = []
    for extent in by_use:
        if excess <= 0:
            break
        going.append(extent.id)
        excess -= extent.bytes + extent.index_bytes
    return tuple(going)


def _idle_extent(census: Census, mine: int, now: float) -> ExtentInfo | None:
    idle = [
        extent
        for extent in census.takeable()
        if extent.namespace != mine and census.used.get(extent.namespace, 0.0) < now - IDLE_AFTER_S
    ]
    return min(idle, key=lambda extent: census.used.get(extent.namespace, 0.0), default=None)


def _unfair_extent(census: Census, mine: int, new_bytes: int) -> ExtentInfo | None:
    held = census.bytes_by_namespace()
    others = [
        extent
        for extent in census.takeable()
        if extent.namespace != mine and (held[mine] == 0 or held[extent.namespace] > held[mine] + new_bytes)
    ]
    return max(others, key=lambda extent: (held[extent.namespace], -extent.id), default=None)
