"""The tiers of one manager: built, opened, told what the coordinator decided, reset and shut down, each by its port.

What touches stored rows goes through the integrity thread first, in order: no tier sees a row without its proof.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

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
from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.coordinator.tier_record import TierSpec
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.events import Event
from kvtier_core.manager.guard import Guard, TierIdentity, make_tier_log
from kvtier_core.manager.integrity import Integrity
from kvtier_core.manager.port import MakePort, TierHome, TierPort
from kvtier_core.namespace import Namespace, payload_sizes
from kvtier_core.policies import PolicyFactory
from kvtier_core.proof import Sealer
from kvtier_core.transfer.pool import Pool
from kvtier_core.values import PoolView, TierContext, TierJob

_SILENT_SHUTDOWN_S = 2.0
"""How long a shutdown takes before people are told what it waits for."""


@dataclass(frozen=True, kw_only=True)
class TierBuild(TierSpec):
    """A configured tier that is still to be built."""

    identity: TierIdentity
    """As messages name the tier."""
    capacity_bytes: int | None
    policies: Mapping[str, PolicyFactory] = field(default_factory=dict)
    """Eviction policies of plugins."""
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    """What must not show in a message, whatever the tier raises."""
    make_port: MakePort = field(repr=False)


class Tiers:
    """The ports of the configured tiers, and the proofs between them and the pool. The engine's thread."""

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
        self.guards = {build.name: Guard(build.identity, build.secrets, log) for build in builds}
        self.ports = {build.name: build.make_port(self._home(build)) for build in builds}
        self._is_shut_down = False

    def _home(self, build: TierBuild) -> TierHome:
        name = build.name
        return TierHome(
            guard=self.guards[name],
            info=build.info,
            limits=build.limits,
            context=TierContext(
                name=name,
                namespace=self._namespace.name,
                description=self._namespace.describe(),
                row_bytes=self._pool.geometry.row_bytes,
                capacity_bytes=build.capacity_bytes,
                policies=build.policies,
                log=make_tier_log(self._log, name, build.secrets),
            ),
            row=self._pool.row,
            clock=self._clock,
            emit=self._emit,
            finish=self._integrity.finish,
        )

    def _discard(self, tier: str, keys: Sequence[OffloadKey], sealer: Sealer) -> None:
        """Blocks that *sealer* should have sealed gave wrong bytes. What a reset has ended says nothing of the tier."""
        if sealer is not self._sealer:
            return
        text = (
            f"wrong bytes came for {len(keys)} blocks (first key {keys[0].hex()[:16]}): they are recomputed"
        )
        self.guards[tier].report("wrong bytes", text, kind="wrong bytes")
        self.ports[tier].discard(keys)

    # -- life

    def start(self) -> None:
        """Build every tier and let it open, which is told as an event."""
        geometry = self._pool.geometry
        view = PoolView(
            address=self._pool.address,
            row_stride=geometry.row_bytes,
            num_rows=geometry.num_rows,
            fd=self._pool.fd,
            fd_offset=geometry.rows_offset,
        )
        for port in self.ports.values():
            port.start(view)

    def reset(self, namespace: Namespace, generation: int) -> None:
        """Every tier serves *namespace*, a new epoch, from when all that is under way to it has been handed on."""
        self._sealer = Sealer(namespace.name)
        name, description = namespace.name, namespace.describe()
        for port in self.ports.values():
            self._integrity.after_sealing(partial(port.reset, name, description, generation))

    def shutdown(self, timeout_s: float) -> bool:
        """As ``TierManager.shutdown``."""
        deadline = self._clock() + timeout_s
        if self._is_shut_down:
            for port in self.ports.values():
                port.shutdown(timeout_s)
        else:
            self._is_shut_down = True
            for port in self.ports.values():
                self._integrity.after_sealing(partial(port.shutdown, timeout_s))
            self._integrity.stop(timeout_s / 2)
        silent_until = min(deadline, self._clock() + _SILENT_SHUTDOWN_S)
        left = self._still_up(self.ports.values(), silent_until)
        if left and silent_until <= self._clock() < deadline:
            self._log.warning(
                "waiting up to %.0f s for %s to shut down: a call to its storage has not returned",
                deadline - self._clock(),
                ", ".join(str(port.identity) for port in left),
            )
            left = self._still_up(left, deadline)
        for guard in self.guards.values():
            if untold := guard.take_untold():
                guard.tell(f"was shut down{untold}")
        return not left

    def _still_up(self, ports: Iterable[TierPort], deadline: float) -> list[TierPort]:
        return [port for port in ports if not port.wait_down(max(0.0, deadline - self._clock()))]

    # -- acting

    def arrived(self, job_id: int) -> Sequence[OffloadKey]:
        """The keys of a load that have come whole, though its tier may not be done with the others."""
        return self._integrity.arrived(job_id)

    def do(self, action: Action) -> None:
        """Carry out what the coordinator wants done."""
        if isinstance(action, SealRows):
            self._integrity.seal(self._sealer, action.job)
            return
        port = self.ports[action.tier]
        if isinstance(action, TellNewRequest | TellRequestFinished | TellStepEnd) and not port.listens:
            return
        match action:
            case SubmitJob(_, kind, job):
                self._submit(port, kind, job)
            case CancelJobs(_, job_ids):
                port.cancel(job_ids)
            case TellTouched(_, keys, chain):
                port.touch(keys, chain)
            case TellNewRequest(_, request):
                port.begin_request(request)
            case TellRequestFinished(_, request, not_stored):
                self._integrity.after_sealing(partial(port.end_request, request, not_stored))
            case TellStepEnd(_, step):
                self._integrity.after_sealing(partial(port.end_step, step))
            case _:
                assert_never(action)

    def _submit(self, port: TierPort, kind: JobKind, job: TierJob) -> None:
        if kind is JobKind.TIER_STORE:
            self._integrity.after_sealing(partial(port.submit, kind, job))
            return
        if kind is JobKind.TIER_LOAD:
            job = self._integrity.begin(
                port.identity.name, job, self._sealer, is_ours=port.loads_on_our_threads
            )
        port.submit(kind, job)
