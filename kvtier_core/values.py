"""The value objects that cross a boundary: core to tier, tier to core, engine to core.

All are frozen. Those that plugins see are keyword-only, and grow only by fields that have a default, so that a plugin
written for an earlier minor release of the same major keeps working. None of them acts.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvtier_core.hints import NO_HINTS, Hints
from kvtier_core.keys import OffloadKey
from kvtier_core.transfer.direction import Direction as Direction  # noqa: PLC0414 - one enum, re-exported


class LookupState(enum.Enum):
    """The primary tier's answer for one key (C10)."""

    HIT = "hit"
    """In the pool, and leased to the asking request."""
    HIT_PENDING = "hit_pending"
    """On its way into the pool; ask again after the next step."""
    RETRY = "retry"
    """A secondary tier has not said yet whether it holds the block; ask again after the next step."""
    MISS = "miss"


class MissReason(enum.Enum):
    """Why a lookup missed (C60)."""

    NOT_STORED = "not_stored"
    """Neither in the pool nor in a tier, and not evicted lately."""
    EVICTED = "evicted"
    """The pool had it not long ago, and no tier has it."""
    BELOW_THRESHOLD = "below_threshold"
    """Offered for storing less often than the pool's ``store_threshold``."""
    PRIMARY_FULL = "primary_full"
    TIER_SLOW = "tier_slow"
    TIER_FAILED = "tier_failed"
    BREAK_EVEN = "break_even"
    INTEGRITY = "integrity"


_SETTLED = (LookupState.HIT, LookupState.MISS)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Up to which token a prompt can be loaded, in all of its groups."""

    tokens: int
    """The end point once the answer is settled, and the one hoped for until then."""
    ready_tokens: int
    """What could be loaded now. While more is pending, only a lone group of full attention is promised that much."""
    state: LookupState
    """``RETRY`` while a block is not even on its way, ``HIT_PENDING`` while all that are not ready are (C10).

    Of a settled answer, ``HIT`` when all that was asked for can be loaded, else ``MISS``.
    """
    reason: MissReason | None = None
    """Why the end point is not a later one."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is pending: asking again after the next step could give no more."""
        return self.state in _SETTLED


@dataclass(frozen=True, slots=True)
class PreparedTransfer:
    """A device transfer to carry out: row ``rows[i]`` is the block of ``keys[i]``; end it by its ``job_id``."""

    job_id: int
    keys: Sequence[OffloadKey]
    rows: Sequence[int]
    evicted: Sequence[OffloadKey] = ()
    sources: Sequence[str] = ()
    """For a load: where each block came from, ``pool`` or a tier's name."""


class OffloadPolicy(enum.Enum):
    """Which of a request's blocks a tier wants (C25)."""

    BLOCK_LEVEL = "block_level"
    REQUEST_LEVEL = "request_level"


@dataclass(frozen=True, kw_only=True)
class TierInfo:
    """Facts of a tier type that are known without opening it.

    ``default_capacity`` is the bound in bytes while the ``capacity`` setting is unset; ``None`` means no bound.
    ``load_batch`` times 4 MiB is the most that one call of ``load_many`` moves; less while that would leave a thread
    idle. ``store_batch`` is the same for ``store_many``: a quarter of it in any case, and more up to half of what there
    is to store. All threads together store at most a quarter of the tier at once, and one call at most 1,024 blocks.
    """

    medium: str
    shared: bool = False
    persistent: bool = False
    bounded_by: Literal["core", "tier", "storage"] = "core"
    """What keeps the tier inside its capacity.

    The core evicts by policy through ``delete``; it can't evict from a tier on the hook specs. A tier that bounds
    itself reports what it dropped through its context. A storage has a limit of its own that kvtier does not set, such
    as a server's memory: a ``capacity`` or ``policy`` in the settings is refused then.
    """
    ttl_by: Literal["core", "tier"] = "core"
    """What ends blocks that are older than the ``ttl`` setting: the core does for the tiers that it bounds.

    A ``ttl`` for a tier that bounds itself is refused, unless the tier says that it keeps to it.
    """
    default_capacity: int | None = None
    store_batch: int = 1
    load_batch: int = 1
    reports_contents: bool = False
    """A tier that reports what it holds (``TierContext.report_stored`` and ``report_evicted``), though it is shared.

    The report is complete when ``on_open`` or ``reset`` returns, or the first ``follow`` of a tier on the blocking
    interface. From then on the tier is not asked about keys that are not in it. The core adds what a store has put
    there.
    """

    def resolve_capacity(self, setting: int | None) -> int | None:
        """The bound in bytes that holds for this value of the ``capacity`` setting; ``None`` means no bound."""
        return self.default_capacity if setting is None else setting


_chain_lock = threading.Lock()
_last_chain = 0


def _next_chain() -> int:
    """The microsecond it is now, in the epoch, or the next one that no request has."""
    global _last_chain  # noqa: PLW0603 - chains are of the process, as its requests are
    with _chain_lock:
        _last_chain = max(_last_chain + 1, time.time_ns() // 1000)
        return _last_chain


def begin_of(chain: int, now: float) -> float:
    """When the request with this number began, in seconds since the epoch; *now* where that is not known."""
    return min(chain / 1e6, now) if chain else now


@dataclass(frozen=True, kw_only=True)
class RequestInfo:
    """One request as tiers see it. ``params`` are the engine's ``kv_transfer_params``.

    ``chain`` is this request's own number in this process, above 0: a tier that bounds itself hands it to its eviction
    policy with the request's blocks (``Entry.chain``), so that the end of a prompt leaves before its beginning. It also
    tells when the request began (``begin_of``).
    ``hints`` say what the client knows about the use of its blocks. The core honours them in the pool.
    ``not_stored`` is filled for ``on_request_finished`` alone, and for a tier that gets whole requests
    (``OffloadPolicy.REQUEST_LEVEL``): the keys of this request that it should have got and was never given.
    """

    request_id: str
    num_tokens: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    not_stored: Sequence[OffloadKey] = ()
    hints: Hints = NO_HINTS
    chain: int = field(default_factory=_next_chain, init=False, repr=False, compare=False)

    @property
    def wants_remote_decode(self) -> bool:
        """Whether another node goes on with this request: every tier it may store to gets all of it (C25)."""
        return self.params.get("do_remote_decode") is True


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """The pool's mapping, for tiers that register memory.

    Row 0 is at ``address`` in this process and at ``fd_offset`` in the file ``fd``; rows are ``row_stride`` bytes
    apart.
    """

    address: int
    row_stride: int
    num_rows: int
    fd: int | None = None
    fd_offset: int = 0


@dataclass(frozen=True, kw_only=True)
class TierJob:
    """One asynchronous piece of work between the pool and one tier.

    ``buffers[i]`` is the whole row (payload, padding, proof) of ``keys[i]``: read-only for a store, writable for a
    load, valid until the job's result. A lookup job has no rows and no buffers. ``deadline`` is on the
    ``time.monotonic`` clock; work that has not started by then is best refused.
    """

    id: int
    request: RequestInfo
    keys: Sequence[OffloadKey]
    rows: Sequence[int] = ()
    buffers: Sequence[memoryview] = ()
    deadline: float = float("inf")
    arrived: Callable[[Sequence[int]], None] | None = None
    """Of a load: may be told the positions of blocks whose buffers are filled and will not be touched any more.

    Their proofs are checked while others still load. Right ones count even when the job passes its deadline; the others
    are lost then. A block that is named again is checked with the result. Bytes written into a right one later may be
    served, as after the result. From any thread; returns at once. The result is due all the same.
    """
    is_prefix: bool = False
    """Of a lookup: the keys follow one another, and behind the first that is not there no answer is needed.

    The tier may stop asking its storage there, and say ``None`` of all that follows.
    """


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """How a job ended. Exactly one is due for every job, also when there was nothing to do.

    ``present`` answers a lookup, one bool a key, in order. ``None`` stands for a key that the tier can't tell of in
    time: the others count, and this one is asked again. ``missing`` are keys that are not there (absence, no fault),
    or, for a store, that the tier declined. ``held``, for a store, are keys that were there already, so that nothing
    was written. ``failed`` are keys that could not be moved, or asked about (a fault). ``error`` says why, in words,
    without secrets; an error with neither missing nor failed keys means that every key failed.
    """

    job_id: int
    present: Sequence[bool | None] | None = None
    missing: Sequence[OffloadKey] = ()
    failed: Sequence[OffloadKey] = ()
    error: str | None = None
    held: Sequence[OffloadKey] = ()


@dataclass(frozen=True, kw_only=True)
class BlockInfo:
    """One stored block as ``scan`` finds it. ``bytes`` is the room it takes.

    ``time`` is when it was stored, for its age, and ``used`` when it was used last, where the tier knows that
    (``SupportsMarks``), for the order of eviction: both in seconds since the epoch.
    """

    key: OffloadKey
    bytes: int
    time: float
    used: float | None = None


@dataclass(frozen=True, kw_only=True)
class TierEvent:
    """A change of a tier's contents. ``cleared`` empties it, ``stored`` and ``removed`` name their keys."""

    kind: Literal["stored", "removed", "cleared"]
    keys: Sequence[OffloadKey] = ()


@dataclass(frozen=True, kw_only=True)
class TierContext:
    """A tier instance's surroundings, as the core gives them. Kept by the tier, shared with nobody.

    ``namespace`` is safe as a directory or object name; one instance on the blocking interface serves one
    namespace all its life. ``description`` is that namespace in readable form, for a file beside the data.
    ``row_bytes`` is the size of every block that will be stored (a multiple of 4096). ``capacity_bytes`` is the
    resolved ``capacity`` setting, ``None`` when there is no bound. ``wake`` may be called from any thread when a
    result is ready; a tier that never calls it is polled.
    ``report_stored`` and ``report_evicted`` may be called from any thread. They are for tiers on the blocking interface
    that bound themselves or that others change (``SupportsFollow``), and for tiers on the hook specs with
    ``TierInfo.reports_contents``. A key reported as stored that is not there costs a load that finds nothing. A key
    reported as evicted that is there costs a hit. ``policies`` are the eviction policies of plugins, for
    ``make_policy``.
    """

    name: str
    namespace: str
    row_bytes: int
    capacity_bytes: int | None = None
    description: Mapping[str, Any] = field(default_factory=dict)
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("kvtier"))
    wake: Callable[[], None] = lambda: None
    report_evicted: Callable[[Sequence[OffloadKey]], None] = lambda _keys: None
    report_stored: Callable[[Sequence[OffloadKey]], None] = lambda _keys: None
    policies: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
