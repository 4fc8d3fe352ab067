"""The tiers of one manager: built, opened, told what the coordinator decided, reset and shut down, each by its host.

What touches stored rows goes through the integrity thread first, in order: no tier sees a row without its proof.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from kvtier_core.coordinator import (
    Action,
    CancelJobs,
    JobKind,
    SealRows,
    SubmitJob,
    TellNewRequest,
    TellRequestFinished,
    TellStepEnd,
    TellTouched,
)
from kvtier_core.errors import ConfigError, KvtierError, TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.events import Event
from kvtier_core.manager.guard import TierIdentity, text_of
from kvtier_core.manager.host import TierHost
from kvtier_core.manager.integrity import Integrity
from kvtier_core.manager.tier_log import make_tier_log
from kvtier_core.manager.tracebacks import log_traceback
from kvtier_core.masking import mask_text
from kvtier_core.namespace import Namespace, payload_sizes
from kvtier_core.proof import Sealer
from kvtier_core.tier_settings import TierLimits
from kvtier_core.transfer.pool import Pool
from kvtier_core.values import PoolView, TierContext, TierInfo

_SILENT_SHUTDOWN_S = 2.0
"""How long a shutdown takes before people are told what it waits for."""


@dataclass(frozen=True, kw_only=True)
class TierBuild:
    """A configured tier that is still to be built: ``build`` makes the object with the hook implementations."""

    identity: TierIdentity
    info: TierInfo
    limits: TierLimits
    store_threshold: int = 1
    capacity_bytes: int | None
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    """What must not show in a message, whatever the tier raises."""
    build: Callable[[TierContext], object] = field(repr=False)


class Tiers:
    """The hosts of the configured tiers, and the proofs between them and the pool. The engine's thread."""

    def __init__(
        self,
        builds: Sequence[TierBuild],
        namespace: Namespace,
        pool: Pool,
        clock: Callable[[], float],
        emit: Callable[[Event], None],
        log: logging.Logger,
        check_threads: int,
    ) -> None:
        self._builds = builds
        self._namespace = namespace
        self._pool = pool
        self._clock = clock
        self._emit = emit
        self._log = log
        self._sealer = Sealer(namespace.name)
        self._integrity = Integrity(
            pool,
            payload_sizes(namespace.groups),
            emit=emit,
            discard=self._discard,
            log=log,
            check_threads=check_threads,
        )
        self.hosts = {build.identity.name: self._host(build) for build in builds}
        self.identities = {name: host.identity for name, host in self.hosts.items()}
        self._is_shut_down = False

    def _host(self, build: TierBuild) -> TierHost:
        return TierHost(
            build.identity,
            secrets=build.secrets,
            limits=build.limits,
            pool=self._pool,
            clock=self._clock,
            emit=self._emit,
            integrity=self._integrity,
            log=self._log,
        )

    def _discard(self, tier: str, keys: Sequence[OffloadKey]) -> None:
        self.hosts[tier].discard(keys)

    # -- life

    def start(self) -> None:
        """Build every tier and let it open, which is told as an event. Raises ``TierOpenError`` or ``ConfigError``."""
        geometry = self._pool.geometry
        view = PoolView(
            address=self._pool.address,
            row_stride=geometry.row_bytes,
            num_rows=geometry.num_rows,
            fd=self._pool.fd,
            fd_offset=geometry.rows_offset,
        )
        for build in self._builds:
            host = self.hosts[build.identity.name]
            host.start(self._build(build, host), view)

    def _build(self, build: TierBuild, host: TierHost) -> object:
        try:
            return build.build(self._context(build, host))
        except KeyboardInterrupt:
            raise  # on the engine's own thread: somebody wants it to end
        except BaseException as error:  # noqa: BLE001 - a plugin's constructor, which may raise anything, secrets included
            log_traceback(self._log, str(build.identity), error, lambda text: mask_text(text, build.secrets))
            text = mask_text(text_of(error), build.secrets)
            kind = ConfigError if isinstance(error, ConfigError) else TierOpenError
            is_explained = isinstance(error, KvtierError) and error.is_explained
        failed = kind(f"{build.identity} could not be built: {text}")
        failed.is_explained = is_explained
        raise failed

    def _context(self, build: TierBuild, host: TierHost) -> TierContext:
        return TierContext(
            name=build.identity.name,
            namespace=self._namespace.name,
            description=self._namespace.describe(),
            row_bytes=self._pool.geometry.row_bytes,
            capacity_bytes=build.capacity_bytes,
            log=make_tier_log(self._log, build.identity.name, build.secrets),
            wake=host.wake,
        )

    def reset(self, namespace: Namespace, generation: int) -> None:
        """Every tier serves *namespace*, a new epoch, from when all that is under way to it has been handed on."""
        self._sealer = Sealer(namespace.name)
        name, description = namespace.name, namespace.describe()
        for host in self.hosts.values():
            self._integrity.after_sealing(partial(host.reset, name, description, generation))

    def shutdown(self, timeout_s: float) -> bool:
        """As ``TierManager.shutdown``."""
        deadline = self._clock() + timeout_s
        if not self._is_shut_down:
            self._is_shut_down = True
            for host in self.hosts.values():
                self._integrity.after_sealing(partial(host.shutdown, timeout_s))
            self._integrity.stop(timeout_s / 2)
        started = [host for host in self.hosts.values() if host.is_started]
        left = self._still_up(started, min(deadline, self._clock() + _SILENT_SHUTDOWN_S))
        if left and self._clock() < deadline:
            self._log.warning(
                "waiting up to %.0f s for %s to shut down: a call to its storage has not returned",
                deadline - self._clock(),
                ", ".join(str(host.identity) for host in left),
            )
            left = self._still_up(left, deadline)
        return not left

    def _still_up(self, hosts: Sequence[TierHost], deadline: float) -> list[TierHost]:
        return [host for host in hosts if not host.wait_down(max(0.0, deadline - self._clock()))]

    # -- acting

    def arrived(self, job_id: int) -> Sequence[OffloadKey]:
        """The keys of a load that have come whole, though its tier may not be done with the others."""
        return self._integrity.arrived(job_id)

    def do(self, action: Action) -> None:
        """Carry out what the coordinator wants done."""
        match action:
            case SubmitJob(tier, kind, job):
                submit = partial(self.hosts[tier].submit, kind, job, self._sealer)
                if kind is JobKind.TIER_STORE:
                    self._integrity.after_sealing(submit)
                else:
                    submit()
            case SealRows(job):
                self._integrity.seal(self._sealer, job)
            case TellNewRequest(tier, request):
                self.hosts[tier].begin_request(request)
            case TellRequestFinished(tier, request, not_stored):
                self._integrity.after_sealing(partial(self.hosts[tier].end_request, request, not_stored))
            case CancelJobs(tier, job_ids):
                self.hosts[tier].tell("cancel_jobs", job_ids=job_ids)
            case TellStepEnd(tier, step):
                self._integrity.after_sealing(partial(self.hosts[tier].tell, "on_schedule_end", step=step))
            case TellTouched(tier, keys, chain):
                self.hosts[tier].touch(keys, chain)
            case _:
                assert_never(action)
