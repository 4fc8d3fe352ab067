"""A world without threads or bytes around one coordinator: fake clock, scripted tiers, rows whose contents are values.

A test says what the engine does and how each job is answered; the world carries the coordinator's actions out and,
after every step, checks what must always hold. What it checks is written down in ``World.check`` and beside the
places that raise ``InvariantError``. It decides nothing that the coordinator decides.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, assert_never

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
from kvtier_core.coordinator.endpoints import GroupShape, is_prefix, unit_of
from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.coordinator.results import Finished
from kvtier_core.coordinator.tier_record import TierSpec
from kvtier_core.hints import NO_HINTS, Hints
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.ledger import READY, Block, Ledger
from kvtier_core.policies import make_policy
from kvtier_core.values import (
    JobResult,
    Lookup,
    LookupState,
    MissReason,
    PreparedTransfer,
    RequestInfo,
    TierJob,
)
from tests.policies.every import FROM_PLUGINS
from tests.sim import chain_order, holding, invariants
from tests.sim.books import check_books
from tests.sim.hook_order import HookOrder, InvariantError
from tests.sim.scripted import (
    Answer,
    Content,
    DeviceTransfer,
    JobHook,
    JunkSource,
    Payload,
    RunningJob,
    ScriptedTier,
    TierScript,
)

MAX_HOLD_S = 30.0
"""No hint of a simulated request keeps a block for longer."""
Tell = TellNewRequest | TellRequestFinished | CancelJobs | TellStepEnd | TellTouched


def make_keys(names: str, group: int = 0) -> list[OffloadKey]:
    """One key a character: ``make_keys("abc")``. Keys of equal characters are equal."""
    return [make_offload_key(name.encode().rjust(32, b"."), group) for name in names]


def generous_limits(num_rows: int, **changes: float) -> PoolLimits:
    """Pool limits that let a tiny pool be used as a whole, but for *changes*, by name of the field."""
    limits: dict[str, Any] = {
        "max_promotion_rows": num_rows,
        "max_cascade_rows": num_rows,
        "lease_timeout_s": 30.0,
        "device_timeout_s": 60.0,
    }
    return PoolLimits(**{**limits, **changes})


@dataclass(frozen=True)
class PrefixAnswer:
    """A lookup's answer for one group of full attention, and what it means for each key (C10).

    ``states`` ends with the first key that answers RETRY or MISS.
    """

    found: Lookup
    states: Sequence[LookupState]

    @property
    def hits(self) -> int:
        """Leading blocks that can be loaded now."""
        return [*self.states, None].index(next((s for s in self.states if s is not LookupState.HIT), None))

    @property
    def is_settled(self) -> bool:
        """As the answer says."""
        return self.found.is_settled

    @property
    def reason(self) -> MissReason | None:
        """As the answer says."""
        return self.found.reason


def _state_of(block: Block | None) -> LookupState:
    if block is None:
        return LookupState.RETRY
    return LookupState.HIT if block.state is READY else LookupState.HIT_PENDING


class World:
    """One coordinator, driven as the acting part would drive it. One thread.

    Every public method that acts runs ``check`` at its end (every *check_every*-th time, for long runs in large pools)
    and raises ``InvariantError`` (or the coordinator's own ``AssertionError``) when something that must never happen
    has happened.
    """

    def __init__(
        self,
        num_rows: int,
        tiers: Sequence[TierScript | str] = (),
        *,
        limits: PoolLimits | None = None,
        policy: str = "lru",
        groups: Sequence[GroupShape] = (GroupShape(),),
        check_every: int = 1,
    ) -> None:
        self.now = 1000.0
        self.epoch = 0
        self.rows: list[Content] = []  # (num_rows,)
        scripts = [TierScript(name=tier) if isinstance(tier, str) else tier for tier in tiers]
        self._new_junk = JunkSource()
        self.rows.extend(self._new_junk() for _ in range(num_rows))
        self.tiers = {script.name: ScriptedTier(script, self.rows, self._new_junk) for script in scripts}
        specs = [
            TierSpec(
                name=tier.script.name,
                info=tier.info,
                limits=tier.script.limits,
                store_threshold=tier.script.store_threshold,
            )
            for tier in self.tiers.values()
        ]
        limits = limits or generous_limits(num_rows)
        for script in scripts:
            limits = replace(limits, **script.pool_limits)
        self._store_threshold = limits.store_threshold
        self._has_picky_tier = any(script.store_threshold > 1 for script in scripts)
        self._withheld: set[OffloadKey] = set()
        """Keys that a request's filter kept from a tier, at some time."""
        self._offers: dict[OffloadKey, set[str]] = {}
        """Which requests have offered a key."""
        self._not_stored: set[str] = set()
        """Requests that a reset or a preemption met and that have not begun anew."""
        self.coordinator = Coordinator(
            num_rows, make_policy(policy, num_rows, FROM_PLUGINS), specs, limits, groups
        )
        self.groups = groups
        self.running: dict[int, RunningJob] = {}
        """Tier jobs that have not been answered, quarantined ones among them."""
        self.transfers: dict[int, DeviceTransfer] = {}
        """Device transfers under way, by job id."""
        self.hold_sealing = False
        """Keep rows from being sealed, and their stores from leaving, until ``finish_sealing``."""
        self._sealing: list[SealRows | SubmitJob] = []
        self.hooks = HookOrder()
        """The hooks that the tiers have seen called."""
        self.shortened = 0
        """How often a chain lost its end and kept its beginning."""
        self.gave_way = 0
        """How often retained blocks left because nothing else could."""
        self.prefetched = 0
        """How often a step's end had a prompt brought that its request had not asked for."""
        self._infos: dict[str, RequestInfo] = {}
        self._step = 0
        self._check_every = check_every
        self._acts = 0
        for name in self.tiers:
            self.tier_ready(name)

    @property
    def ledger(self) -> Ledger:
        """The coordinator's ledger, for reading."""
        return self.coordinator.state.ledger

    # -- the engine

    def new_request(
        self,
        *request_ids: str,
        load_tiers: Collection[str] | None = None,
        store_tiers: Collection[str] | None = None,
        remote_decode: bool = False,
        hints: Hints = NO_HINTS,
    ) -> None:
        """Requests begin; with *remote_decode* another node goes on with them."""
        for request_id in request_ids:
            info = RequestInfo(request_id=request_id, params={"do_remote_decode": remote_decode}, hints=hints)
            self.coordinator.new_request(
                info, self.now, load_tiers=load_tiers, store_tiers=store_tiers, pin_rows=hints.pin_bytes
            )
            self._infos[request_id] = self.coordinator.state.requests[request_id].info
            for name in self.tiers if remote_decode else ():
                if store_tiers is None or name in store_tiers:
                    self.hooks.whole(name, request_id)
        self._act()

    def prefetch(self, request_id: str, keys: Sequence[Sequence[OffloadKey]]) -> None:
        """A request's prompt is to be brought to the pool. Of the bytes that hints pin, one is a row."""
        self.coordinator.prefetch(request_id, keys)

    def begin(self, request_id: str) -> None:
        """A request has nothing on the device, and is about to compute."""
        self.coordinator.request_begins(request_id)
        self._not_stored.discard(request_id)

    def preempt(self, request_id: str) -> None:
        """The engine takes a request's device blocks."""
        self.coordinator.request_preempted(request_id)
        self._not_stored.add(request_id)

    def finish(self, *request_ids: str) -> None:
        """Requests end, or are aborted."""
        for request_id in request_ids:
            self.coordinator.request_finished(request_id)
        self._act()

    def lookup(self, request_id: str, keys: Sequence[OffloadKey]) -> PrefixAnswer:
        """Look the prompt *keys* of a model with one group up, once."""
        found = self.find_end_point(request_id, (keys,))
        states = []
        for block in self.ledger.find_all(keys[: found.tokens // self.groups[0].tokens_per_block]):
            states.append(_state_of(block))
            if block is None:
                break
        if found.reason is not None:
            states.append(LookupState.MISS)
        answer = PrefixAnswer(found, states)
        if answer.hits * self.groups[0].tokens_per_block != found.ready_tokens:
            raise InvariantError(f"{found} does not tell how much is ready: {states} (C10)")
        return answer

    def find_end_point(
        self, request_id: str, keys: Sequence[Sequence[OffloadKey]], max_tokens: int | None = None
    ) -> Lookup:
        """Look an end point of all groups up, once; *max_tokens* leaves keys out."""
        keys = self._within(keys, max_tokens)
        lent = self._lent()
        answer = self.coordinator.lookup(request_id, keys, self.now)
        self._check_lent(lent)
        if not 0 <= answer.ready_tokens <= answer.tokens or answer.tokens % unit_of(self.groups):
            raise InvariantError(f"{answer} is no end point for {self.groups}")
        leased = set(self.coordinator.state.requests[request_id].leases)
        needed = set(self._needed(keys, answer.tokens))
        is_kept = leased >= needed if is_prefix(self.groups) else leased == needed
        if answer.is_settled and not is_kept:
            raise InvariantError(f"{request_id} was promised {answer} and has leases on {leased} (C13, C21)")
        self._act()
        return answer

    def _within(
        self, keys: Sequence[Sequence[OffloadKey]], max_tokens: int | None
    ) -> Sequence[Sequence[OffloadKey]]:
        if max_tokens is None:
            return keys
        return tuple(
            of_group[: max_tokens // shape.tokens_per_block]
            for shape, of_group in zip(self.groups, keys, strict=True)
        )

    def _lent(self) -> dict[str, int]:
        """The rows that each tier may write."""
        tiers = self.coordinator.state.tiers
        return {name: tier.loading_rows + tier.quarantined_rows for name, tier in tiers.items()}

    def _check_lent(self, before: dict[str, int]) -> None:
        for name, tier in self.coordinator.state.tiers.items():
            invariants.check_lent(tier, before[name])

    def prepare_store(self, request_id: str, keys: Sequence[OffloadKey]) -> PreparedTransfer | None:
        """Begin a device store: from now on its rows are half-written."""
        if request_id in self._not_stored:
            prepared = self.coordinator.prepare_store(request_id, keys, self.now)
            if prepared is None or prepared.keys:
                raise InvariantError(f"{request_id} may not store {keys}, and got {prepared} (C04)")
            return prepared
        held = {key for key in keys if self.ledger.find(key) is not None}
        self._note_offers(request_id, keys, held)
        standing = chain_order.standing(self.ledger, held)
        before = holding.look(self.coordinator.state, held)
        prepared = self.coordinator.prepare_store(request_id, keys, self.now)
        if prepared is not None:
            self.gave_way += holding.check_left(before, self.ledger, prepared.evicted)
        if prepared is not None:
            self.shortened += chain_order.check_left(standing, self.ledger, prepared.evicted)
        if prepared is not None and list(prepared.keys) != self._to_store(request_id, keys, held):
            raise InvariantError(
                f"asked to store {keys}, of which {held} were held, got {prepared} (C11, C15)"
            )
        if prepared is not None and not set(keys).isdisjoint(prepared.evicted):
            raise InvariantError(f"a key asked for was evicted: {prepared} (C11)")
        self.hooks.offered(request_id, keys)
        if prepared is not None and prepared.keys:
            contents = [Content(Payload(key, self.epoch)) for key in prepared.keys]
            self.transfers[prepared.job_id] = DeviceTransfer(request_id, prepared, contents, is_store=True)
            self._spoil(prepared.rows)
        self._act()
        return prepared

    def _note_offers(self, request_id: str, keys: Sequence[OffloadKey], held: Collection[OffloadKey]) -> None:
        for key in dict.fromkeys(keys):
            offerers = self._offers.setdefault(key, set())
            may_be_given = key in self._withheld or (self._has_picky_tier and request_id not in offerers)
            if may_be_given and key in held:
                # A tier may be given now what another request's filter, or a threshold, kept from it.
                self.hooks.stored(request_id, [key])
            offerers.add(request_id)
            if self.coordinator.state.known(request_id).store_tiers is not None:
                self._withheld.add(key)

    def _to_store(
        self, request_id: str, keys: Sequence[OffloadKey], held: Collection[OffloadKey]
    ) -> list[OffloadKey]:
        """What an offer must get rows for: keys that are not held and that enough requests have offered."""
        threshold = 1 if self.coordinator.is_request_level(request_id) else self._store_threshold
        new = [key for key in dict.fromkeys(keys) if key not in held]
        return [key for key in new if len(self._offers[key]) >= threshold]

    def complete_store(self, job_id: int, *, success: bool = True) -> None:
        """The device has written the rows, whatever became of them meanwhile."""
        transfer = self.transfers.pop(job_id)
        for row, content in zip(transfer.prepared.rows, transfer.contents, strict=True):
            self.rows[row] = content if success else self._new_junk()
        if not self.coordinator.state.jobs[job_id].overdue:
            self.hooks.offered(transfer.request, transfer.prepared.keys)
        if success:
            self.hooks.stored(transfer.request, transfer.prepared.keys)
        self.coordinator.complete_store(job_id, success=success, now=self.now)
        self._act()

    def prepare_load(self, request_id: str, keys: Sequence[OffloadKey]) -> PreparedTransfer:
        """Begin a device load: its rows must hold exactly the blocks asked for."""
        return self._begin_load(request_id, self.coordinator.prepare_load(request_id, keys))

    def load_end_point(
        self, request_id: str, keys: Sequence[Sequence[OffloadKey]], max_tokens: int
    ) -> tuple[PreparedTransfer, int]:
        """Begin a device load of what all groups can be loaded up to, and the end point that this is."""
        keys = self._within(keys, max_tokens)
        end = self.coordinator.loadable(keys)
        needed = self._needed(keys, end)
        prepared = self.prepare_load(request_id, needed)
        if list(prepared.keys) != needed or end > max_tokens:
            raise InvariantError(f"{prepared} does not bring what {end} tokens need: {needed} (C21, K12-O3)")
        return prepared, end

    def _needed(self, keys: Sequence[Sequence[OffloadKey]], end: int) -> list[OffloadKey]:
        """The keys that an end point needs, by the token each ends at."""
        ends = [
            ((index + 1) * shape.tokens_per_block, of_group[index])
            for shape, of_group in zip(self.groups, keys, strict=True)
            for index in shape.needed(end)
        ]
        return [key for _, key in sorted(ends, key=itemgetter(0))]

    def _begin_load(self, request_id: str, prepared: PreparedTransfer) -> PreparedTransfer:
        if prepared.keys:
            contents = [self.rows[row] for row in prepared.rows]
            for key, content in zip(prepared.keys, contents, strict=True):
                if content.payload != Payload(key, self.epoch):
                    raise InvariantError(f"wrong bytes for {key.hex()} in epoch {self.epoch}: {content}")
            self.transfers[prepared.job_id] = DeviceTransfer(request_id, prepared, contents, is_store=False)
        self._act()
        return prepared

    def complete_load(self, job_id: int) -> None:
        """The device has read the rows, which must not have changed meanwhile."""
        transfer = self.transfers.pop(job_id)
        for row, content in zip(transfer.prepared.rows, transfer.contents, strict=True):
            if self.rows[row].payload != content.payload:
                raise InvariantError(f"row {row} changed under a device load: {content} -> {self.rows[row]}")
        self.coordinator.complete_load(job_id)
        self._act()

    def end_step(self) -> None:
        """The engine's step ends."""
        lent, loading = self._lent(), self.coordinator.state.promoting_rows
        self.coordinator.end_step(self._step, self.now)
        self._check_lent(lent)
        self.prefetched += self.coordinator.state.promoting_rows > loading
        self._step += 1
        loads = Counter(
            (action.tier, action.job.request.request_id)
            for action in self._act()
            if isinstance(action, SubmitJob) and action.kind is JobKind.TIER_LOAD
        )
        if any(count > 1 for count in loads.values()):
            raise InvariantError(f"more than one load job for a tier and request in one step: {loads}")

    def advance(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.coordinator.tick(self.now, lambda job_id: self.running[job_id].arrived)
        self._act()

    def reset(self, *, tiers: bool = True, ready: bool = True) -> None:
        """A new cache epoch; with ``ready=False`` no tier serves it yet."""
        self.coordinator.reset(tiers=tiers)
        self.hooks.forget()
        self._not_stored.update(self.coordinator.state.requests)
        if tiers:
            self.epoch += 1
            for running in self.running.values():
                running.is_stale = True
        self._act()
        for name in self.tiers if tiers and ready else ():
            self.tier_ready(name)

    # -- the tiers

    def ask_for_whole(self, name: str, request_id: str) -> None:
        """A tier's ``on_new_request`` returns that it wants the whole request, however late."""
        request = self.coordinator.state.requests.get(request_id)
        if request is not None and request.may_store_to(name):
            self.hooks.whole(name, request_id)
        self.coordinator.on_request_level(name, self._infos[request_id])
        self._act()

    def tier_ready(self, name: str) -> None:
        """A tier serves the current epoch from now on."""
        tier = self.tiers[name]
        tier.serve(self.epoch)
        self.coordinator.tier_ready(name, tier if tier.script.resident else None)
        self._act()

    def jobs(self, hook: JobHook, tier: str | None = None) -> list[int]:
        """Jobs that no tier has answered, oldest first."""
        return [
            job_id
            for job_id, running in self.running.items()
            if running.hook is hook and tier in (None, running.tier)
        ]

    def answer(
        self, job_id: int, answer: Answer = Answer.OK, chosen: Collection[OffloadKey] | None = None
    ) -> None:
        """A tier answers a job; *chosen* are the keys that go wrong, all by default."""
        running = self.running.pop(job_id)
        tier = self.tiers[running.tier]
        if running.hook is JobHook.STORE and not running.is_cancelled:
            self._check_source(running)
        result = tier.perform(running, answer, running.job.keys if chosen is None else chosen)
        self._report(Finished(result, self._find_corrupt(running, result)))

    def arrive(self, job_id: int, chosen: Collection[OffloadKey]) -> None:
        """A tier fills the rows of these keys of a load, says so, and touches those that are right no more."""
        running = self.running[job_id]
        for key, row in running.rows_by_key():
            if key in chosen and key not in running.arrived:
                self.rows[row] = self.tiers[running.tier].contents.get(key, self._new_junk())
                if self.rows[row].proves(Payload(key, running.epoch)):
                    running.arrived.add(key)
        self.check()

    def answer_all(self, hook: JobHook, tier: str | None = None, answer: Answer = Answer.OK) -> None:
        """Answer every job of one kind alike."""
        for job_id in self.jobs(hook, tier):
            self.answer(job_id, answer)

    def report(self, result: JobResult) -> None:
        """A tier hands out a result of the test's own making, which moves nothing."""
        self._report(Finished(result))

    def fault(self, tier: str) -> None:
        """A hook of a tier raises."""
        self.coordinator.on_fault(tier, self.now)
        self._act()

    def scribble(self, job_id: int) -> None:
        """A tier writes into the rows of a load that it has not answered, as it may at any time."""
        running = self.running[job_id]
        assert running.hook is JobHook.LOAD, running
        self._spoil([row for key, row in running.rows_by_key() if key not in running.arrived])
        self.check()

    def _report(self, finished: Finished) -> None:
        self.coordinator.on_finished(finished, self.now)
        self._act()

    def _check_source(self, running: RunningJob) -> None:
        for key, row in zip(running.job.keys, running.job.rows, strict=True):
            name = Payload(key, running.epoch)
            if self.rows[row].payload != name or not self.rows[row].proves(name):
                raise InvariantError(
                    f"a store that is waited for reads row {row} as {self.rows[row]}, not {name}"
                )

    def _find_corrupt(self, running: RunningJob, result: JobResult) -> list[OffloadKey]:
        """What the acting part's check of the loaded rows would find."""
        if running.hook is not JobHook.LOAD:
            return []
        not_loaded = {*result.missing, *result.failed}
        if result.error is not None and not not_loaded:
            not_loaded = set(running.job.keys)
        return [
            key
            for key, row in zip(running.job.keys, running.job.rows, strict=True)
            if key not in not_loaded and not self.rows[row].proves(Payload(key, running.epoch))
        ]

    # -- short cuts for tests

    def put(self, request_id: str, keys: Sequence[OffloadKey], *, cascade: bool = True) -> None:
        """Compute blocks anew and store them in the pool and, with *cascade*, in the tiers that they go on to.

        They must fit.
        """
        self.begin(request_id)
        prepared = self.prepare_store(request_id, keys)
        assert prepared is not None, "no room in the pool"
        self.complete_store(prepared.job_id)
        if cascade:
            self.answer_all(JobHook.STORE)

    def fetch(self, request_id: str, keys: Sequence[OffloadKey], *, max_steps: int = 100) -> PrefixAnswer:
        """Look up, answering every lookup and load honestly, until asking again could give no more."""
        found = self.lookup(request_id, keys)
        for _ in range(max_steps):
            if found.is_settled:
                return found
            self.answer_all(JobHook.LOOKUP)
            self.end_step()
            self.answer_all(JobHook.LOAD)
            found = self.lookup(request_id, keys)
        raise InvariantError(f"not settled after {max_steps} steps: {found}")

    # -- acting

    def _spoil(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.rows[row] = self._new_junk()

    def _act(self) -> list[Action]:
        actions = self.coordinator.take_actions()
        for action in actions:
            self._do(action)
        self._acts += 1
        if self._acts % self._check_every == 0:
            self.check()
        return actions

    def _do(self, action: Action) -> None:
        match action:
            case SubmitJob(tier, JobKind.TIER_LOAD, job):
                self._submit(JobHook.LOAD, tier, job)
                self._spoil(job.rows)
            case SubmitJob(tier, JobKind.LOOKUP, job):
                self._submit(JobHook.LOOKUP, tier, job)
            case SealRows() | SubmitJob():
                self._sealing.append(action)
                if not self.hold_sealing:
                    self.finish_sealing()
            case _:
                self._tell(action)

    def _tell(self, action: Tell) -> None:
        match action:
            case TellNewRequest(tier, request):
                self.hooks.new_request(tier, request.request_id)
            case TellRequestFinished(tier, request, not_stored):
                self.hooks.request_finished(tier, request.request_id, not_stored)
            case CancelJobs(tier, job_ids):
                for job_id in job_ids:
                    if job_id in self.running:  # else it still waits for its sealing
                        self.running[job_id].is_cancelled = True
            case TellStepEnd(tier, _):
                self.hooks.other("on_schedule_end", tier)
            case TellTouched(tier, keys, _):
                self.hooks.other("touch", tier, keys)
            case _:
                assert_never(action)

    def finish_sealing(self) -> None:
        """Seal what waits for it, in order, and hand its stores to the tiers."""
        while self._sealing:
            action = self._sealing.pop(0)
            job = action.job
            if isinstance(action, SealRows):
                for key, row in zip(job.keys, job.rows, strict=True):
                    self._seal(key, row)
                self.coordinator.on_sealed(job.id)
            elif job.deadline > self.now:
                self._submit(JobHook.STORE, action.tier, job)
            else:  # as a tier's port does
                too_late = Finished(JobResult(job_id=job.id, error="too late"))
                self.coordinator.on_finished(too_late, self.now)

    def _seal(self, key: OffloadKey, row: int) -> None:
        name = Payload(key, self.epoch)
        if self.rows[row].payload != name:
            raise InvariantError(f"row {row} would be sealed as {name} but holds {self.rows[row]}")
        self.rows[row] = self.rows[row].seal(name)

    def _submit(self, hook: JobHook, tier: str, job: TierJob) -> None:
        serves = self.tiers[tier].epoch
        if serves != self.epoch:
            raise InvariantError(
                f"{hook.value} of epoch {self.epoch} reaches {tier}, which serves {serves} (C34)"
            )
        self.hooks.submit(hook.value, tier, job.request.request_id, job.keys)
        self.running[job.id] = RunningJob(hook, tier, job, self.epoch)

    # -- what must always hold

    def check(self) -> None:
        """Check what must hold after every step. Cost: proportional to the pool and the jobs under way.

        The coordinator's books agree; the limits on rows hold; no row is written by one transfer while another may
        touch it; every block that answers HIT has exactly its own bytes of this epoch.
        """
        check_books(self.coordinator.state)
        invariants.check_limits(self.coordinator.state)
        invariants.check_rows_in_use(self.running.values(), self.transfers.values())
        invariants.check_pending_answers(self.coordinator.state)
        invariants.check_hits(self.ledger, self.rows, self.epoch)

    def check_at_rest(self) -> None:
        """After ``settle``: every count is zero and every row can be had again (C13, K3-O4)."""
        invariants.check_at_rest(self.coordinator.state)
        if self.hooks.open:
            raise InvariantError(f"tiers were not told of the end of {sorted(self.hooks.open)} (C26)")

    def settle(self) -> None:
        """Bring everything to rest: end all transfers, answer all jobs, finish all requests."""
        for job_id, transfer in list(self.transfers.items()):
            if transfer.is_store:
                self.complete_store(job_id)
            else:
                self.complete_load(job_id)
        requests = self.coordinator.state.requests
        self.finish(*[name for name, request in requests.items() if not request.finished])
        self.advance(MAX_HOLD_S)
        while self.running:
            self.answer(next(iter(self.running)))
