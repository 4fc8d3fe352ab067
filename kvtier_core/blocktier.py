"""The blocking interface (contract C52): the short way to write a tier.

A tier author writes six methods that block. The core supplies threads, batching, priorities, presence, capacity,
eviction, retries, deadlines and counters. Calls come from up to ``threads`` threads (a setting every tier has), never
two at a time on one key, and none while ``open``, ``scan`` or ``close`` runs. A call that raises ``ConnectionError``,
``TimeoutError`` or one of the type's own ``transient`` exceptions is made again after a pause, at most twice, while its
job's deadline allows. Any other exception fails the block at once. An exception that is an answer, for one key of
several, counts as one that was raised.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from kvtier_core.keys import OffloadKey
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import BlockInfo, TierContext, TierInfo


class BlockTier(ABC):
    """Base of tiers on the blocking interface. Subclass it, set ``Settings`` and ``info``, write the six methods."""

    Settings: ClassVar[type[TierSettings]] = TierSettings
    info: ClassVar[TierInfo]
    transient: ClassVar[tuple[type[Exception], ...]] = ()
    """A client library's own exceptions after which the same call may well succeed in a moment.

    Example: redis raises a ``redis.ConnectionError``, which is none of Python's: name it here, or it is not retried.
    """
    stores_nothing: bool = False
    """Set it in ``open`` where the storage can only be read: the core then stores and deletes nothing."""

    @classmethod
    def for_settings(cls, settings: TierSettings) -> "type[BlockTier]":  # noqa: ARG003 - for those who override it
        """The class that serves *settings*: this one, unless a setting chooses among several ways to store. Pure."""
        return cls

    def __init__(self, settings: TierSettings, context: TierContext) -> None:
        """Keep both; do no I/O here."""
        self.settings = settings
        self.context = context

    @abstractmethod
    def open(self) -> None:
        """Make ready. May do I/O. Raises ``TierOpenError`` when the tier can't work as configured."""

    @abstractmethod
    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool | Exception]:
        """Which of *keys* are stored, one bool each, in order; an exception for a key that could not be asked about.

        *keys* are at most 256, fewer if each takes its time: a long lookup is asked in parts, a prefix up to shortly
        behind its first absent key. The answers so far count when ``limits.lookup_timeout`` is nearly over. Raising
        means that none could be asked about.
        """

    @abstractmethod
    def store(self, key: OffloadKey, block: memoryview) -> None:
        """Store one block: visible whole on return, or never. Keeps no reference to *block*. Raises on a fault."""

    @abstractmethod
    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Fill *into* with the block: True when filled, False when absent or not whole. Raises on a fault.

        After the return, whatever it is, *into* must not be written any more, nor any slice or array made of it: the
        memory is another block's then. The core can't prevent it, and after its check of the block can't notice it.
        """

    @abstractmethod
    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove these blocks; absent ones are no error."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Calling it twice is fine, and after an ``open`` that raised too."""


@runtime_checkable
class SupportsScan(Protocol):
    """A tier that can enumerate its blocks. Needed if it is persistent and bounded by the core."""

    def scan(self) -> Iterable[BlockInfo]:
        """Every stored block of this namespace. Called once, right after ``open`` and by the same thread."""
        ...


@runtime_checkable
class SupportsMarks(Protocol):
    """A tier bounded by the core that remembers over a restart when a block was used last."""

    def mark_used(self, marks: Mapping[OffloadKey, float]) -> None:
        """The last request that used a block began then, in seconds since the epoch: ``scan`` tells it again.

        As ``BlockInfo.used``. Called at most once a minute for a block, and after the store of a block whose request
        began in an earlier minute. Absent blocks are passed over.
        """
        ...


@runtime_checkable
class SupportsRemoval(Protocol):
    """A tier that can remove its namespace, so that tools leave nothing behind. For persistent tiers."""

    def remove_namespace(self) -> None:
        """Remove everything of this namespace from the storage, its description included, and nothing else.

        Called after ``open`` and last but for ``close``; no other call runs meanwhile. Raises on a fault.
        """
        ...


@runtime_checkable
class SupportsBatch(Protocol):
    """A tier that moves several blocks in one call better than one by one."""

    def store_many(
        self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        """Store each; True, False (declined) or an exception a key, in order.

        Decline what the storage has no room for: it is no fault, and the tier stays in the path.
        """
        ...

    def load_many(
        self, keys: Sequence[OffloadKey], intos: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        """Fill each; True, False (absent) or an exception a key, in order."""
        ...


@runtime_checkable
class SupportsHolds(Protocol):
    """A tier that others fill too (``TierInfo.shared``), and where a question costs less than a store."""

    def holds(self, keys: Sequence[OffloadKey]) -> Sequence[bool | Exception]:
        """Which blocks are there whole, as far as can be told without reading them; an exception where it can't be.

        Called before the stores of these blocks: one that is there is not stored again. The blocks of one request are
        asked about up to the first that is not there. Never asked: a block that gave this process wrong bytes or could
        not be loaded, and any block where ``ttl`` is set, because a store renews its age.
        """
        ...


@runtime_checkable
class SupportsFollow(Protocol):
    """A tier that other processes change too, or that changes by itself, and that can say how.

    The core then knows what it holds as it knows it of a tier that it changes alone, as of the last ``follow``.
    """

    follow_interval: float
    """Seconds between two calls of ``follow``, above 0; read once, when the tier has opened."""

    def follow(self) -> None:
        """Report through ``context.report_stored`` and ``report_evicted`` what changed since the last call.

        The first call, right after ``open`` and by the same thread, reports everything the tier holds. Later calls come
        from a thread of their own, at the same time as others, until ``close``. Raises on a fault; the next call is
        made all the same. Also the place for whatever else has to be done from time to time.
        """
        ...


@runtime_checkable
class SupportsTouch(Protocol):
    """A tier that bounds itself and wants to know which blocks are used from warmer tiers."""

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks were used. Comes from a thread of the core; does no I/O."""
        ...


@runtime_checkable
class SupportsChains(Protocol):
    """A tier that bounds itself by an eviction policy, and lets the end of a prompt leave before its beginning."""

    def arrange(self, chain: int, keys: Sequence[OffloadKey], depths: Sequence[int]) -> None:
        """The request with the number *chain* stored, loaded or touched these blocks; they stand at *depths* in it.

        For ``Entry.chain`` and ``Entry.depth``; a key that is gone meanwhile is passed over. Follows the ``store``,
        ``load`` or ``touch`` of them, on the same thread; does no I/O.
        """
        ...
