"""Whether a configured tier works: opened, given one block, asked for it, told to forget it, all through the real path.

Decides what is tried in which order and what a failure means. Uses a small pool and a namespace of its own, removes
that namespace as far as the tier can, and never touches any other. A tier that hangs is left to its daemon threads:
nobody waits longer than the time given.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from kvtier_core.blocktier import BlockTier, SupportsRemoval
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.errors import KvtierError
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.manager import TierManager
from kvtier_core.manager.guard import log_traceback, text_of
from kvtier_core.masking import mask_text
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.plugins import class_of_tier
from kvtier_core.policies import LRU
from kvtier_core.proof import PROOF_BYTES, ROW_ALIGNMENT
from kvtier_core.runtime import plan_tier
from kvtier_core.settings import Settings
from kvtier_core.transfer.pool import Pool, PoolGeometry
from kvtier_core.values import Lookup, MissReason, RequestInfo, TierContext

_ROW_BYTES = 1 << 20
"""Of the one block that is moved, if the tier has room for ``_MIN_ROWS`` of them; else it is the smallest there is."""
_MIN_ROWS = 64
_NUM_ROWS = 4
_GRACE_S = 2.0
"""Seconds beyond the timeout for shutting down and removing what was stored."""

_ADVICE = {
    "open": 'see that its storage is there and may be written; "kvtier config" shows its settings',
    "store": "see that its storage has room and may be written",
    "load": "see that its storage may be read and keeps what it is given",
    "answer in time": "see what its storage waits for, or raise these limits in [tiers.NAME.limits]",
    "keep to the interface": "tell the tier's author: the blocks are right, but an engine counts this as a fault",
    "open again": "see what its first instance left that keeps the next one out, such as a lock",
    "close": "tell the tier's author: close raised, after the blocks were right",
    "delete": "see that blocks may be deleted there; what stays takes room for good",
    "shut down": "see what its storage waits for; an engine that stops would leave this tier's threads behind",
}


@dataclass(kw_only=True)
class TierReport:
    """What came of one tier.

    ``seconds`` has the steps that went well; ``problem`` is set if one did not, ``advice`` unless the problem
    itself says what to do. ``left_behind`` says what could not be removed.
    """

    name: str
    type: str
    distribution: str
    version: str
    ok: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    failed_step: str | None = None
    problem: str | None = None
    advice: str | None = None
    left_behind: str | None = None


def examine_tier(settings: Settings, name: str, timeout_s: float) -> TierReport:
    """Try the configured tier *name*, for at most *timeout_s* and two seconds more.

    Never raises for what the tier does.
    """
    examination = _Examination(settings, name, timeout_s)
    thread = threading.Thread(target=examination.run, name=f"kvtier-doctor-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s + _GRACE_S)
    return examination.report(hangs=thread.is_alive())


class _StepFailed(Exception):  # noqa: N818 - not an error of its own: it carries one to the report
    """A step did not do what it should, in words."""


class _Examination:
    """One tier's examination. ``run`` belongs to one thread; ``report`` may be called from another when time is up."""

    def __init__(self, settings: Settings, name: str, timeout_s: float) -> None:
        tier_type = settings.tier_types[name]
        self._settings = settings
        self._name = name
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._class = class_of_tier(tier_type, settings.tiers[name])
        self._capacity = tier_type.cls.info.resolve_capacity(settings.tiers[name].capacity)
        is_roomy = self._capacity is None or self._capacity >= _MIN_ROWS * _ROW_BYTES
        self._row_bytes = _ROW_BYTES if is_roomy else ROW_ALIGNMENT
        self._payload_bytes = self._row_bytes - PROOF_BYTES
        self._namespace = Namespace(
            model="kvtier-doctor",
            kv_dtype="uint8",
            tokens_per_block=1,
            groups=(GroupSpec(layers=("doctor",), block_bytes=self._payload_bytes),),
            layout="doctor",
        )
        self._content = os.urandom(self._payload_bytes)
        self._key = make_offload_key(hashlib.sha256(self._content).digest(), 0)
        self._messages = _Messages()
        self._log = logging.getLogger(f"kvtier.doctor.{name}")
        self._secrets: Collection[str] = ()
        self._step = "open"
        self._report = TierReport(
            name=name,
            type=settings.tiers[name].type,
            distribution=tier_type.distribution,
            version=tier_type.version,
        )

    def run(self) -> None:
        """Try everything, in order, up to the first failure; then remove what was stored."""
        self._log.addHandler(self._messages)
        # The report says it all, but for tracebacks.
        self._log.propagate = self._log.isEnabledFor(logging.DEBUG)
        went_well = self._attempt(self._through_the_pool)
        if "open" in self._report.seconds and not self._attempt(self._clean_up):
            went_well = False
            self._report.left_behind = self._leftovers()
        self._report.ok = went_well
        self._log.removeHandler(self._messages)

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do *work*; whether it raised nothing."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever a plugin raises is what this is here to find out
            log_traceback(self._log, self._step, error, lambda text: mask_text(text, self._secrets))
            known = isinstance(error, KvtierError | _StepFailed)
            self._fail(
                text_of(error) if known else f"{type(error).__name__}: {text_of(error)}",
                is_explained=isinstance(error, KvtierError) and error.is_explained,
            )
            return False
        return True

    def report(self, *, hangs: bool) -> TierReport:
        """What is known so far; with *hangs*, the step under way is the one that failed."""
        report = replace(self._report, seconds=dict(self._report.seconds))
        if hangs:
            self._fail(f"no answer within {self._timeout_s:g} s")
            report = replace(
                self._report, seconds=dict(report.seconds), ok=False, left_behind=self._leftovers()
            )
        return report

    def _leftovers(self) -> str:
        return f"whatever it holds under {self._namespace.name}"

    def _fail(self, problem: str, *, is_explained: bool = False) -> None:
        if self._report.problem is None:  # what went wrong first explains what went wrong later
            self._report.failed_step = self._step
            self._report.problem = mask_text(problem, self._secrets)
            self._report.advice = None if is_explained else _ADVICE[self._step]

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        self._step = step
        started = time.perf_counter()
        yield
        self._report.seconds[step] = time.perf_counter() - started

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    # -- through the pool

    def _through_the_pool(self) -> None:
        build = plan_tier(self._settings, self._name, self._row_bytes)
        # An engine may start without it; here, that it can't open is the answer.
        build = replace(build, limits=build.limits.model_copy(update={"open_retry": None}))
        self._secrets = build.secrets
        pool = Pool.create(PoolGeometry(num_rows=_NUM_ROWS, row_bytes=self._row_bytes))
        manager = TierManager(
            pool=pool,
            namespace=self._namespace,
            tiers=[build],
            policy=LRU(),
            limits=PoolLimits(
                max_promotion_rows=1,
                max_cascade_rows=1,
                lease_timeout_s=self._timeout_s,
                device_timeout_s=self._timeout_s,
            ),
            reset_tiers=False,
            log=self._log,
        )
        try:
            with self._timed("open"):
                manager.open(self._timeout_s)
            with self._timed("store"):
                self._store(manager, pool)
            with self._timed("load"):
                self._load(manager, pool)
        finally:
            told = self._messages.last  # the shutdown tells how often it came again, and not what it was
            is_down = manager.shutdown(_GRACE_S / 2)
            if is_down:
                pool.close()
        if not is_down:
            self._step = "shut down"
            raise _StepFailed("it did not confirm its shutdown")
        manager.wait(0)  # takes in what the tier did up to its end
        if manager.counters.tiers[self._name].faults:
            self._step = "keep to the interface"
            raise _StepFailed(told or self._messages.last or "the engine counts a fault")

    def _store(self, manager: TierManager, pool: Pool) -> None:
        request = RequestInfo(request_id="store")
        manager.new_request(request)
        prepared = manager.reserve_store(request.request_id, [self._key])
        assert prepared is not None, "an empty pool has room"
        pool.row(prepared.rows[0])[: self._payload_bytes] = self._content
        manager.commit_store(prepared.job_id, success=True)
        manager.request_finished(request.request_id)
        manager.end_step()
        self._wait(manager, lambda: not manager.has_pending_work)
        if manager.counters.tiers[self._name].stored != 1:
            declined = manager.counters.tiers[self._name].declined
            what = "the tier declined the block" if declined else "the block was not stored in time"
            raise _StepFailed(self._messages.last or what)

    def _load(self, manager: TierManager, pool: Pool) -> None:
        # The block must come from the tier: nothing of it may be left in the pool, not even in a row that is free.
        pool.rows_array[:] = 0
        manager.reset_cache()
        request = RequestInfo(request_id="load")
        manager.new_request(request)

        answers: list[Lookup] = []

        def settled() -> bool:
            answers.append(manager.lookup(request.request_id, [[self._key]]))
            manager.end_step()
            return answers[-1].is_settled

        self._wait(manager, settled)
        prepared = manager.reserve_load(request.request_id, [self._key])
        if not prepared.keys:
            if answers[-1].reason is MissReason.TIER_SLOW:
                self._step = "answer in time"
                raise _StepFailed("it took longer than limits.lookup_timeout or limits.load_timeout allow")
            raise _StepFailed(self._messages.last or "the block that was just stored is not found")
        same = pool.row(prepared.rows[0])[: self._payload_bytes] == self._content
        manager.commit_load(prepared.job_id)
        manager.request_finished(request.request_id)
        assert same, "a block whose proof held has other bytes"

    def _wait(self, manager: TierManager, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if not self._left_s():
                why = f": {self._messages.last}" if self._messages.last else ""
                raise _StepFailed(f"no answer within {self._timeout_s:g} s{why}")
            manager.wait(self._left_s())

    # -- afterwards

    def _clean_up(self) -> None:
        """Delete the block through a second instance, as the next process would find it, and remove the namespace."""
        if not issubclass(self._class, BlockTier):
            if self._class.info.persistent:
                self._report.left_behind = (
                    f"one block under {self._namespace.name}: this tier type can't delete"
                )
            return
        self._delete(self._class)

    def _delete(self, tier_class: type[BlockTier]) -> None:
        self._step = "open again"
        tier = tier_class(self._settings.tiers[self._name], self._context())
        tier.open()
        try:
            with self._timed("delete"):
                self._delete_block(tier, [self._key])
                if isinstance(tier, SupportsRemoval):
                    tier.remove_namespace()
                elif tier_class.info.persistent:
                    self._report.left_behind = (
                        f"what describes the namespace {self._namespace.name}: this tier type can't remove it"
                    )
        except BaseException:
            with suppress(Exception):  # what went wrong first is what is told
                tier.close()
            raise
        self._step = "close"
        tier.close()

    def _delete_block(self, tier: BlockTier, keys: list[OffloadKey]) -> None:
        if tier.info.persistent and "load" in self._report.seconds and list(tier.contains(keys)) != [True]:
            raise _StepFailed("a second instance, opened later, does not find the stored block")
        tier.delete(keys)
        if list(tier.contains(keys)) != [False]:
            raise _StepFailed("the block is still there after it was deleted")

    def _context(self) -> TierContext:
        return TierContext(
            name=self._name,
            namespace=self._namespace.name,
            description=self._namespace.describe(),
            row_bytes=self._row_bytes,
            capacity_bytes=self._capacity,
            log=self._log,
        )


class _Messages(logging.Handler):
    """Keeps the last warning: the manager logs why a job failed and hands on only that it did."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.last = record.getMessage()
