"""The hooks of a tier on the blocking interface: hands jobs to the current instance and results back.

Decides only which instance is current; never calls the tier itself. Hooks are called one at a time on the tier's hook
thread and don't wait for I/O, except ``on_open`` and ``reset`` (they open the tier), ``drain_jobs`` and ``shutdown``
(up to their timeout).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtier_core.blocktier import BlockTier
from kvtier_core.errors import ClosedError, ConfigError, KvtierError, TierOpenError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.calls import Fault, describe
from kvtier_core.manager.blocking.instance import TierInstance
from kvtier_core.manager.blocking.jobs import JobBoard
from kvtier_core.manager.blocking.presence import PresenceSet
from kvtier_core.manager.blocking.state import Clocks
from kvtier_core.manager.blocking.work import Kind
from kvtier_core.policies import PolicyFactory, make_policy
from kvtier_core.tier_settings import TierSettings
from kvtier_core.units import format_size
from kvtier_core.values import JobResult, PoolView, TierContext, TierEvent, TierJob, TierUsage

_MAX_RETIRED = 4
"""Earlier instances (one a reset) that may still have calls running: each keeps its threads."""


class BlockTierAdapter:
    """Makes a ``BlockTier`` class, its settings and a context into an object with hook implementations.

    ``context.capacity_bytes`` of ``None`` means the tier type's default capacity, if it has one. Beside the hooks there
    are two methods for any thread, ``resident_presence`` and ``discard``, and ``use`` for the hook thread. *policies*
    are the eviction policies of plugins, by name.
    """

    def __init__(
        self,
        tier_class: type[BlockTier],
        settings: TierSettings,
        context: TierContext,
        *,
        policies: Mapping[str, PolicyFactory] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """No I/O. Raises ``ConfigError`` for an unknown policy or a capacity smaller than one block."""
        capacity = context.capacity_bytes
        if capacity is not None and capacity < context.row_bytes:
            raise ConfigError(
                f"tier {context.name!r}: a capacity of {format_size(capacity)} is smaller than one block "
                f"({format_size(context.row_bytes)}); set capacity to several blocks at least"
            )
        if tier_class.info.bounded_by == "core":
            make_policy(settings.policy, 1, policies)  # refuses an unknown name now, not when the tier opens
        self._tier_class = tier_class
        self._settings = settings
        self._policies = policies
        self._context = context
        self._clocks = Clocks(monotonic=monotonic, wall=wall)
        self._board = JobBoard(context.wake)
        self._retired: list[TierInstance] = []  # of earlier namespaces, with calls still running
        self._was_opened = False
        self._shut_down = False
        self._lock = threading.Lock()  # guards the two below, which other threads read
        self._current: TierInstance | None = None
        self._why_closed = "not open yet"

    # For any thread.

    def resident_presence(self) -> PresenceSet | None:
        """The keys the tier holds, where that is known without asking it, else ``None``.

        A key that is not in the set is absent. Ask for the set each time: a reset replaces it, and a tier that has
        come to hold more than ``limits.max_resident_keys`` has none any more. Blocks past their time to live leave
        it at the next ``get_finished_jobs``; a load refuses them at once.
        """
        instance = self._instance()
        return None if instance is None else instance.state.presence

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks were found corrupt: serve them no more and delete them in an I/O thread.

        A store of the same key submitted later is not deleted by this.
        """
        instance = self._instance()
        if instance is not None:
            instance.state.condemn(keys)

    # Hooks: jobs.

    @hookimpl
    def lookup(self, job: TierJob) -> Sequence[bool] | None:
        """Answer from the presence set where it knows; else ask the tier in an I/O thread."""
        instance = self._instance()
        if instance is not None:
            instance.tick()
            presence = instance.state.presence
            if presence is not None:
                return presence.contains_many(job.keys)
        self._submit(job, Kind.LOOKUP)
        return None

    @hookimpl
    def submit_store(self, job: TierJob) -> None:
        """Queue a store."""
        self._submit(job, Kind.STORE)

    @hookimpl
    def submit_load(self, job: TierJob) -> None:
        """Queue a load, ahead of all that is no load."""
        self._submit(job, Kind.LOAD)

    @hookimpl
    def get_finished_jobs(self) -> Sequence[JobResult]:
        """Results that became ready; also the moment at which deadlines and ages of idle work are looked at."""
        instance = self._instance()
        if instance is not None:
            instance.tick()
        return self._board.take()

    @hookimpl
    def cancel_jobs(self, job_ids: Sequence[int]) -> None:
        """Fail what has not been started of these jobs."""
        instance = self._instance()
        if instance is not None:
            instance.cancel(job_ids)

    @hookimpl
    def drain_jobs(self, timeout_s: float) -> Sequence[int]:
        """Wait for loads and stores; the ids of those that still may touch their buffers."""
        return self._board.wait_settled(timeout_s)

    # Hooks: contents.

    @hookimpl
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count a use of each block for the eviction policy."""
        self.use(keys, 0)

    def use(self, keys: Sequence[OffloadKey], chain: int) -> None:
        """``touch`` that names the request too, by its number (``Entry.chain``). On the hook thread."""
        instance = self._instance()
        if instance is not None:
            instance.touch(keys, chain)

    @hookimpl
    def take_events(self) -> Sequence[TierEvent]:
        """Changes since the last call; the first call, and the first after a reset, starts with ``cleared``."""
        instance = self._instance()
        return [] if instance is None else instance.state.take_events()

    @hookimpl
    def get_usage(self) -> TierUsage | None:
        """Blocks and bytes held, from memory."""
        instance = self._instance()
        return None if instance is None else instance.state.usage()

    # Hooks: life.

    @hookimpl
    def on_open(self, pool: PoolView | None) -> None:  # noqa: ARG002 - blocks come as memoryviews
        """Open the tier and learn what it holds. Raises ``TierOpenError``."""
        assert self._instance() is None, "opened twice"
        self._open()

    @hookimpl
    def reset(self, namespace: str, description: Mapping[str, Any]) -> None:
        """Go on with a new instance for *namespace*; calls in flight end on the old one. Raises ``TierOpenError``."""
        self._context = replace(self._context, namespace=namespace, description=description)
        if self._was_opened:
            self._retire_current("the cache was reset")
            self._open()

    @hookimpl
    def shutdown(self, timeout_s: float) -> None:
        """Fail what is queued, wait for running calls up to *timeout_s*, close the tier. Twice is fine."""
        give_up = time.monotonic() + timeout_s
        self._shut_down = True
        self._retire_current("the tier was shut down")
        self._retired = [
            instance for instance in self._retired if not instance.wait_closed(give_up - time.monotonic())
        ]

    def _open(self) -> None:
        name = self._context.name
        if self._shut_down:
            raise ClosedError(f"tier {name!r} was shut down; it can't be opened again")
        self._was_opened = True
        try:
            self._check_retired()
            instance = TierInstance(
                self._tier_class, self._settings, self._context, self._board, self._clocks, self._policies
            )
            instance.open()
        except BaseException as error:
            with self._lock:
                self._why_closed = f"could not be opened: {describe(error)}"
            if isinstance(error, KvtierError) or not isinstance(error, Exception):
                raise
            raw = TierOpenError(f"tier {name!r} could not be opened: {describe(error)}")
            raw.is_explained = False
            raise raw from error
        with self._lock:
            self._current = instance

    def _check_retired(self) -> None:
        self._retired = [instance for instance in self._retired if not instance.wait_closed(0)]
        if len(self._retired) > _MAX_RETIRED:
            raise TierOpenError(
                f"tier {self._context.name!r} is out of use: calls of {len(self._retired)} earlier instances still run "
                f"and at most {_MAX_RETIRED} may; see why its storage hangs"
            )

    def _retire_current(self, reason: str) -> None:
        with self._lock:
            instance, self._current = self._current, None
            self._why_closed = reason
        if instance is not None:
            self._retired.append(instance)
            instance.retire(reason)

    def _instance(self) -> TierInstance | None:
        with self._lock:
            return self._current

    def _submit(self, job: TierJob, kind: Kind) -> None:
        instance = self._instance()
        if instance is not None:
            instance.submit(job, kind)
            return
        with self._lock:
            fault = Fault(f"tier {self._context.name!r}: {self._why_closed}")
        self._board.begin(job, kind)
        self._board.settle((job.id, index, fault) for index in range(len(job.keys)))
