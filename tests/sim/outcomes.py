"""Which outcomes a simulated run has seen: a run that never meets a case proves nothing about it. It only looks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from kvtier_core.coordinator.breaker import BreakerState
from kvtier_core.coordinator.stats import TierCounters
from kvtier_core.keys import OffloadKey
from kvtier_core.ledger import Block, BlockState
from kvtier_core.values import Lookup, LookupState, MissReason
from tests.sim.scripted import JobHook, Junk, Payload, RunningJob
from tests.sim.world import PrefixAnswer, World

OUTCOMES = frozenset(
    [f"lookup {state.value}" for state in LookupState]
    + [f"miss {reason.value}" for reason in MissReason]
    + [f"tier {counter.name}" for counter in fields(TierCounters)]
    + [
        "a breaker closed again",
        "a breaker opened",
        "a cascade was read too late",
        "a chain lost its end and kept its beginning",
        "a block followed when it was ready",
        "a block waited for a tier that was behind",
        "a finish waited for a device store",
        "a finish waited for late blocks",
        "a tier asked for a whole request late",
        "a tier did not get all of a whole request",
        "a tier got what the pool held already",
        "a late result freed its rows",
        "a lease lapsed",
        "a load brought only a part",
        "a part of an overdue load had come",
        "a hint kept a block",
        "a kept block found no place",
        "a prefetch brought a block",
        "a retained block gave way",
        "what a request stored was dropped",
        "a lookup was answered in part",
        "a planned promotion was handed over",
        "a promotion was shared",
        "a prefix came in waves",
        "a reset met a device load",
        "a reset met a device store",
        "a reset met a tier load",
        "a reset met a tier store",
        "a reset took what was promised",
        "a tier got no more until it answered",
        "a tier was lent no more until a load comes in time",
        "a tier wrote into quarantined rows",
        "a whole block of another epoch was caught",
        "a whole block of another key was caught",
        "groups could be loaded in part at once",
        "loads of all tiers hold what they may",
        "no room for a store",
        "several groups could be loaded",
        "several groups have to wait",
        "the device failed a store",
        "the device took too long",
        "the pool evicted",
        "the quarantine was full",
        "what a reset met was not stored",
    ]
)
"""What every large enough set of runs must see at least once."""


class Watcher:
    """Counts the outcomes of one run in ``seen``."""

    def __init__(self, world: World) -> None:
        self.seen: Counter[str] = Counter()
        self._world = world
        self._following: list[Block] = []
        """Blocks that whole requests waited for after the last step."""
        self._breakers: dict[tuple[str, int], BreakerState] = {}

    def note(self, outcome: str, happened: bool = True) -> None:  # noqa: FBT001, FBT002 - reads as a sentence
        """Count *outcome* if it happened. It must be one of ``OUTCOMES``."""
        assert outcome in OUTCOMES, outcome
        self.seen[outcome] += happened

    def saw_lookup(self, request_id: str, keys: Sequence[OffloadKey], found: PrefixAnswer) -> None:
        """A lookup was answered."""
        for answer in found.states:
            self.note(f"lookup {answer.value}")
        waves = LookupState.RETRY in found.states
        self.note(
            "a prefix came in waves",
            waves and self._world.coordinator.state.requests[request_id].promoting > 0,
        )
        pending = [k for k, s in zip(keys, found.states, strict=False) if s is LookupState.HIT_PENDING]
        if pending:
            self.note("a promotion was shared", self._others_load(request_id, pending))

    def saw_end_point(self, found: Lookup) -> None:
        """A lookup over several groups was answered."""
        self.note("several groups could be loaded", found.is_settled and found.tokens > 0)
        self.note("several groups have to wait", not found.is_settled)
        self.note("groups could be loaded in part at once", 0 < found.ready_tokens < found.tokens)

    def _others_load(self, request_id: str, keys: Sequence[OffloadKey]) -> bool:
        return any(
            running.hook is JobHook.LOAD
            and running.job.request.request_id != request_id
            and not running.is_cancelled
            and not set(keys).isdisjoint(running.job.keys)
            for running in self._world.running.values()
        )

    def before_answer(self, job: RunningJob) -> None:
        """A tier is about to answer *job*."""
        self.note("a late result freed its rows", job.hook is JobHook.LOAD and job.is_cancelled)
        for key, row in zip(job.job.keys, job.job.rows, strict=False):
            name = Payload(key, job.epoch)
            if job.hook is JobHook.STORE:
                self.note("a cascade was read too late", self._world.rows[row].payload != name)
                continue
            content = self._world.tiers[job.tier].contents.get(key)
            if content is not None and not content.proves(name) and not isinstance(content.payload, Junk):
                other = "epoch" if content.payload.key == key else "key"
                self.note(f"a whole block of another {other} was caught")

    def before_reset(self) -> None:
        """A reset is about to come."""
        for transfer in self._world.transfers.values():
            self.note("a reset met a device store" if transfer.is_store else "a reset met a device load")
        self.note("a reset met a tier load", bool(self._world.jobs(JobHook.LOAD)))
        self.note("a reset met a tier store", bool(self._world.jobs(JobHook.STORE)))

    def after_step(self) -> None:
        """A step is over."""
        state = self._world.coordinator.state
        loading = state.promoting_rows + state.quarantined_rows
        self.note("a hint kept a block", bool(state.holds))
        self.note("loads of all tiers hold what they may", loading == state.limits.max_loading_rows)
        for name, tier in state.tiers.items():
            for index, breaker in enumerate(service.breaker for service in tier.services):
                if breaker.state is self._breakers.get((name, index), BreakerState.CLOSED):
                    continue
                self._breakers[name, index] = breaker.state
                self.note("a breaker opened", breaker.state is BreakerState.OPEN)
                self.note("a breaker closed again", breaker.state is BreakerState.CLOSED)
            self.note("a block waited for a tier that was behind", bool(tier.late))
            is_full = tier.quarantined_rows >= tier.max_quarantined_rows
            self.note("the quarantine was full", is_full)
            self.note("a tier got no more until it answered", tier.lookups.owes or tier.stores.owes)
            waits = tier.load_room <= 0 and not is_full
            self.note("a tier was lent no more until a load comes in time", waits)

        self.note("a block followed when it was ready", self._some_followed())
        self._following = list(state.following)

    def _some_followed(self) -> bool:
        return any(block.state is BlockState.READY for block in self._following)

    def at_the_end(self) -> None:
        """The run is over: what the coordinator itself has counted, and what the tiers' hooks have seen."""
        for outcome, count in self._world.hooks.seen.items():
            self.note(outcome, count > 0)
        counters = self._world.coordinator.counters
        self.note("a retained block gave way", self._world.gave_way > 0)
        self.note("a prefetch brought a block", self._world.prefetched > 0)
        self.note("a kept block found no place", counters.not_kept > 0)
        self.note("the pool evicted", counters.evicted > 0)
        self.note("a chain lost its end and kept its beginning", self._world.shortened > 0)
        for reason, count in counters.misses.items():
            self.note(f"miss {reason.value}", count > 0)
        nothing = TierCounters()
        for tier in counters.tiers.values():
            for counter in fields(TierCounters):
                has_counted = getattr(tier, counter.name) != getattr(nothing, counter.name)
                self.note(f"tier {counter.name}", has_counted)
