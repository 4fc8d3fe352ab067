"""One opened blocking tier with its I/O threads: takes jobs apart, makes the calls, settles the parts.

Serves one namespace from ``open`` until ``retire``. ``InstanceState`` decides; calls are made here, outside any lock.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvtier_core.blocktier import (
    BlockTier,
    SupportsChains,
    SupportsFollow,
    SupportsMarks,
    SupportsScan,
    SupportsTouch,
)
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.bounds import BoundedContents
from kvtier_core.manager.blocking.calls import CallOutcome, Fault, TierCalls, interval_of
from kvtier_core.manager.blocking.contents import Contents
from kvtier_core.manager.blocking.jobs import JobBoard
from kvtier_core.manager.blocking.state import InstanceState
from kvtier_core.manager.blocking.work import KEYS_A_CALL, Kind, Unit, batch_limits, retry_at
from kvtier_core.manager.port import TierHome
from kvtier_core.proof import Sealer
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import BlockInfo, TierContext, TierJob

_LOOKUP_SHARE = 0.9
"""A lookup is answered with what is known when so much of its time is over: after its deadline nobody waits for it."""


class TierInstance:
    """A tier object, its threads and its state."""

    def __init__(
        self,
        tier_class: type[BlockTier],
        settings: TierSettings,
        context: TierContext,
        home: TierHome,
        board: JobBoard,
    ) -> None:
        """Make the tier object; no I/O. Raises whatever the tier's constructor raises."""
        self._name = context.name
        self._guard = home.guard
        self._threads = settings.threads
        self._row_bytes = context.row_bytes
        self._sealer = Sealer(context.namespace)
        self._home = home
        self._board = board
        context = replace(context, report_evicted=self._on_evicted, report_stored=self._on_stored)
        self._tier = tier_class(settings, context)
        self._calls = TierCalls(self._tier, home.guard)
        # What a shared tier holds changes without us; listing all of it at the start would buy nothing lasting.
        scans = tier_class.info.bounded_by == "core" or not tier_class.info.shared
        self._scan = self._tier.scan if scans and isinstance(self._tier, SupportsScan) else None
        self._followed = self._tier if isinstance(self._tier, SupportsFollow) else None
        self._touched = self._tier if isinstance(self._tier, SupportsTouch) else None
        self._arranged = self._tier if isinstance(self._tier, SupportsChains) else None
        self._marked = self._tier if isinstance(self._tier, SupportsMarks) else None
        enumerable = self._scan is not None or self._followed is not None
        known = BoundedContents if tier_class.info.bounded_by == "core" else Contents
        contents = known(tier_class.info, settings, context, enumerable=enumerable)
        batch = batch_limits(tier_class.info, settings, context, batches=self._calls.batches)
        # The last thread is kept from stores, so that no load waits for one to end.
        self.state = InstanceState(
            context.name,
            contents,
            batch,
            home,
            max_storing=max(1, self._threads - 1),
            marks=self._marked is not None,
            asks=self._calls.asks and tier_class.info.shared and settings.ttl is None,
        )
        self._count_lock = threading.Lock()
        self._running_threads = 0
        self._closing = False
        self._retired = threading.Event()
        self._closed = threading.Event()

    def open(self) -> None:
        """Open the tier, learn what it holds, make it fit its capacity, start the I/O threads. Called once.

        Raises what the tier raises; the tier is closed then.
        """
        try:
            self._tier.open()
            self._adopt(self._scan() if self._scan is not None else ())
            if self._followed is not None:
                interval = interval_of(self._name, self._followed)
                self._followed.follow()
                self._start_thread("follow", partial(self._follow, self._followed, interval))
            for number in range(self._threads):
                self._start_thread(str(number), self._serve)
        except BaseException:
            self.retire("the tier could not be opened")
            self._leave(0)
            raise

    def submit(self, job: TierJob, kind: Kind) -> float:
        """Queue a job, key by key. Never waits for I/O. Returns by when ``tick`` is due for it."""
        if kind is Kind.LOOKUP:
            now = self._home.clock()
            job = replace(job, deadline=now + _LOOKUP_SHARE * (job.deadline - now))
        self._put(job, kind, self._board.begin(job, kind, self._ahead))
        return job.deadline

    def next_due(self) -> float:
        """When ``tick`` has something to do, at the latest."""
        return min(self.state.next_due(), self._board.next_due(self._home.clock()))

    @property
    def _ahead(self) -> int:
        """Keys of a prefix that may be asked about at a time: a call for each thread."""
        return self._threads * self.state.lookup_pace

    def _put(self, job: TierJob, kind: Kind, positions: Iterable[int]) -> None:
        rows = job.rows or (-1,) * len(job.keys)
        units = [
            Unit(
                kind=kind,
                key=job.keys[index],
                job_id=job.id,
                position=index,
                row=rows[index],
                deadline=job.deadline,
                chain=job.request.chain,
            )
            for index in positions
        ]
        if not self.state.put(units):
            self._fail(units, "it was reset or shut down meanwhile", is_end=True)

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Fail what has not been started of these jobs."""
        self._fail(self.state.drop_jobs(job_ids), "cancelled before the work started")

    def tick(self) -> None:
        """Let time pass for queued work, for blocks, and for lookups, which are answered with what is known by then."""
        self._give_up(self.state.tick())
        self._board.answer_due(self._home.clock())

    def retire(self, reason: str) -> None:
        """Take no more work and fail what is queued; the tier is closed when its last running call has ended."""
        self._retired.set()
        self._fail(self.state.retire(), reason, is_end=True)

    def touch(self, keys: Sequence[OffloadKey], chain: int) -> None:
        """Count a use of each block, where the core or the tier keeps the order of eviction."""
        self.state.touch(keys, chain)
        if self._touched is not None:
            self._touched.touch(keys)
        self._arrange(chain, keys, range(len(keys)))

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until the retired tier has been closed; false when a call still runs after *timeout_s*."""
        return self._closed.wait(max(0.0, timeout_s))

    def _adopt(self, found: Iterable[BlockInfo]) -> None:
        surplus = self.state.adopt(found)
        if self._tier.stores_nothing:
            return
        for begin in range(0, len(surplus), KEYS_A_CALL):
            keys = surplus[begin : begin + KEYS_A_CALL]
            fault = self._delete_blocks(keys)
            self.state.deleted(keys, fault)
            if fault is not None:
                # Storage that can't be written still serves; the first store that needs room tries again.
                left = f"{len(surplus) - begin} blocks that are too old or beyond the capacity"
                self._guard.report("delete", f"{fault.text}; {left} stay, but are not served")
                return

    def _start_thread(self, name: str, work: Callable[[], None]) -> None:
        # A daemon: a call that hangs must not keep the process from ending.
        thread = threading.Thread(target=work, name=f"kvtier-{self._name}-{name}", daemon=True)
        with self._count_lock:
            self._running_threads += 1
        try:
            thread.start()
        except RuntimeError:
            with self._count_lock:
                self._running_threads -= 1
            raise

    def _leave(self, threads: int) -> None:
        """So many threads end; when none is left, the tier is closed, once."""
        with self._count_lock:
            self._running_threads -= threads
            if self._running_threads > 0 or self._closing:
                return
            self._closing = True
        fault = self._calls.command("close", self._tier.close)
        if fault is not None:
            self._guard.report("close", fault.text)
        self._closed.set()

    def _on_evicted(self, keys: Sequence[OffloadKey]) -> None:
        self.state.gone(keys)

    def _on_stored(self, keys: Sequence[OffloadKey]) -> None:
        self.state.appeared(keys)

    def _follow(self, tier: SupportsFollow, interval: float) -> None:
        while not self._retired.wait(interval):
            if (fault := self._calls.command("follow", tier.follow)) is not None:
                self._guard.report("follow", f"{fault.text}; what it holds may have changed unnoticed")
        self._leave(1)

    def _fail(self, units: Sequence[Unit], reason: str, *, is_end: bool = False) -> None:
        if units:
            fault = Fault(f"tier {self._name!r}: {reason}", is_end=is_end)
            self._settle([(unit, fault) for unit in units])

    def _give_up(self, units: Sequence[Unit]) -> None:
        """Their deadline passed before they were begun. Of a lookup nothing is known then; it is no fault."""
        lookups = [unit for unit in units if unit.kind is Kind.LOOKUP]
        self._settle([(unit, None) for unit in lookups])
        others = [unit for unit in units if unit.kind is not Kind.LOOKUP]
        self._fail(others, "the deadline passed before the work started")

    def _settle(self, ended: Sequence[tuple[Unit, CallOutcome | None]]) -> None:
        """Tell how units ended, and ask further where a lookup goes on."""
        by_job: dict[int, dict[int, CallOutcome | None]] = {}
        for unit, outcome in ended:
            if unit.job_id is not None:
                by_job.setdefault(unit.job_id, {})[unit.position] = outcome
        for job, positions in self._board.settle(by_job, self._ahead):
            self._put(job, Kind.LOOKUP, positions)
        if any(unit.kind is Kind.LOOKUP for unit, _ in ended):
            self._board.answer_due(self._home.clock())

    # On the I/O threads.

    def _serve(self) -> None:
        while units := self.state.next_units():
            now = self._home.clock()
            late = [unit for unit in units if unit.deadline <= now]
            timely = [unit for unit in units if unit.deadline > now] if late else units
            outcomes = self._perform(timely) if timely else []
            ended = self._home.clock()
            due = [
                None if outcome is True else retry_at(unit, outcome, ended)
                for unit, outcome in zip(timely, outcomes, strict=True)
            ]
            self._distrust_failed_loads(timely, outcomes, due)
            self._arrange_all(timely, outcomes)
            self.state.done(units)
            # All at once: whoever waits for jobs is woken once for a call, and not in the middle of its jobs.
            self._settle(
                [
                    (unit, outcome)
                    for unit, outcome, again in zip(timely, outcomes, due, strict=True)
                    if again is None or not self.state.put_later(unit._replace(tries=unit.tries + 1), again)
                ]
            )
            self._give_up(late)
        self._leave(1)

    def _perform(self, units: list[Unit]) -> list[CallOutcome]:
        match units[0].kind:
            case Kind.LOAD:
                return self._ask(units, self._load)
            case Kind.LOOKUP:
                return self._ask(units, self._look_up)
            case Kind.DELETE:
                return self._delete(units)
            case Kind.MARK:
                return [self._mark({unit.key: unit.mark for unit in units}) or True] * len(units)
            case Kind.STORE:
                return self._store(units)

    def _load(self, units: list[Unit]) -> list[CallOutcome]:
        return self._calls.load(_keys(units), [self._home.row_to_load(unit.row) for unit in units])

    def _look_up(self, units: list[Unit]) -> list[CallOutcome]:
        begin = self._home.clock()
        answers = self._calls.contains(_keys(units))
        self.state.looked_up(len(units), self._home.clock() - begin)
        return answers

    def _distrust_failed_loads(
        self, units: Sequence[Unit], outcomes: Sequence[CallOutcome], due: Sequence[float | None]
    ) -> None:
        """A block that could not be loaded, and is not tried again, or was not there whole, is served no more."""
        failed = [
            unit.key
            for unit, outcome, again in zip(units, outcomes, due, strict=True)
            if outcome is not True and unit.kind is Kind.LOAD and again is None
        ]
        if failed:
            self.state.distrust(failed)

    def _arrange_all(self, units: Sequence[Unit], outcomes: Sequence[CallOutcome]) -> None:
        """Blocks were stored or loaded: let the tier have them in the order of their requests."""
        by_chain: dict[int, list[Unit]] = {}
        for unit, outcome in zip(units, outcomes, strict=True) if self._arranged is not None else ():
            if outcome is True:
                by_chain.setdefault(unit.chain, []).append(unit)
        for chain, of_chain in by_chain.items():
            self._arrange(chain, _keys(of_chain), [unit.depth for unit in of_chain])

    def _arrange(self, chain: int, keys: Sequence[OffloadKey], depths: Sequence[int]) -> None:
        if self._arranged is None or not chain:  # lookups and deletes are of no chain
            return
        fault = self._calls.command("arrange", partial(self._arranged.arrange, chain, keys, depths))
        if fault is not None:
            self._guard.report("arrange", f"{fault.text}; the order in which its blocks leave may be wrong")

    def _ask(self, units: list[Unit], call: Callable[[list[Unit]], list[CallOutcome]]) -> list[CallOutcome]:
        """Call the tier for the units whose blocks may be there; blocks it says are absent leave the contents."""
        lacking = self.state.lacking(_keys(units))
        asked = [unit for unit, lacks in zip(units, lacking, strict=True) if not lacks]
        answers = call(asked) if asked else []
        if False in answers:
            self.state.absent(
                [unit.key for unit, answer in zip(asked, answers, strict=True) if answer is False]
            )
        if len(asked) == len(units):
            return answers
        following = iter(answers)
        return [False if lacks else next(following) for lacks in lacking]

    def _delete(self, units: list[Unit]) -> list[CallOutcome]:
        keys = self._still_to_delete(*self.state.condemned(units))
        if self._tier.stores_nothing:
            return [True] * len(units)  # they stay, and are not served
        fault = self._delete_blocks(keys) if keys else None
        self.state.deleted(keys, fault)
        if fault is not None:
            self._guard.report("delete", f"{fault.text}; {len(keys)} blocks stay, but are not served")
        return [fault or True] * len(units)

    def _delete_blocks(self, keys: Sequence[OffloadKey]) -> Fault | None:
        return self._calls.command("delete", partial(self._tier.delete, keys))

    def _mark(self, marks: Mapping[OffloadKey, float]) -> Fault | None:
        assert self._marked is not None, "a mark for a tier that takes none"
        if self._tier.stores_nothing:
            return None
        fault = self._calls.command("mark_used", partial(self._marked.mark_used, marks))
        if fault is not None:
            text = f"{fault.text}; after a restart {len(marks)} blocks may leave out of turn"
            self._guard.report("mark_used", text)
        return fault

    def _still_to_delete(
        self, keys: Sequence[OffloadKey], doubted: Sequence[OffloadKey]
    ) -> Sequence[OffloadKey]:
        """*keys* without those *doubted* that are read again now, and are not for us to delete (C37)."""
        if not doubted:
            return keys
        told = self._calls.read_again(doubted, self._row_bytes, self._sealer.proves, self._retired.is_set)
        kept = frozenset(self.state.read_again(told))
        self._guard.tell(
            f"gave wrong bytes for {len(doubted)} blocks: {list(told.values()).count(True)} are right when read again, "
            f"{len(doubted) - len(kept)} are deleted, and {sum(not told[key] for key in kept)} are left to the others "
            "that use it. If most are right, look for what changes bytes on the way to this machine"
        )
        return [key for key in keys if key not in kept]

    def _store(self, units: list[Unit]) -> list[CallOutcome]:
        if self._tier.stores_nothing:
            return [False] * len(units)  # declined
        plan = self.state.plan_stores(units)
        no_room: Fault | None = None
        if plan.victims:
            no_room = self._delete_blocks(plan.victims)
            self.state.room_made(plan, no_room)
        admitted = [unit for unit, outcome in zip(units, plan.outcomes, strict=True) if outcome is None]
        answers: list[CallOutcome] = []
        if no_room is not None:
            answers = [Fault(f"no room could be made: {no_room.text}")] * len(admitted)
        elif admitted:
            answers = self._store_lacking(admitted, plan.to_ask)
        if begun := self.state.stored(_keys(admitted), answers):
            self._mark(begun)
        following = iter(answers)
        return [next(following) if outcome is None else outcome for outcome in plan.outcomes]

    def _store_lacking(self, units: list[Unit], to_ask: list[Unit]) -> list[CallOutcome]:
        ended = self.state.asked(to_ask, self._calls.holds(_keys(to_ask))) if to_ask else {}
        left = [unit for unit in units if unit.key not in ended]
        if left:
            answers = self._calls.store(_keys(left), [self._home.row_to_store(unit.row) for unit in left])
            ended.update(zip(_keys(left), answers, strict=True))
        return [ended[unit.key] for unit in units]


def _keys(units: Sequence[Unit]) -> list[OffloadKey]:
    return [unit.key for unit in units]
