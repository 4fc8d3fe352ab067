"""A seeded random run of a ``World``: one seed is one run, the same on every machine and in every process.

``python -m kvtier_core.testing.simulation --seeds 100 --steps 2000 --json`` runs many; a run that breaks a rule says
how to replay it. The world checks the rules after every step; this module decides what happens next, sees to it that
everything can be brought to rest at the end, and counts which outcomes were seen at all.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from random import Random

from kvtier_core.coordinator import Lookup, PoolLimits, TierCounters
from kvtier_core.coordinator.breaker import BreakerState
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.ledger import BlockState
from kvtier_core.testing.scripted import (
    LOOKUP_ANSWERS,
    MOVE_ANSWERS,
    Answer,
    JobHook,
    Junk,
    Payload,
    RunningJob,
    TierScript,
)
from kvtier_core.testing.world import World
from kvtier_core.tier_settings import TierLimits
from kvtier_core.values import JobResult, LookupState, MissReason

OUTCOMES = frozenset(
    [f"lookup {state.value}" for state in LookupState]
    + [f"miss {reason.value}" for reason in MissReason]
    + [f"tier {counter.name}" for counter in fields(TierCounters)]
    + [
        "a breaker closed again",
        "a breaker opened",
        "a cascade was read too late",
        "a finish waited for a device store",
        "a late result freed its rows",
        "a lease lapsed",
        "a load brought only a part",
        "a planned promotion was handed over",
        "a promotion was shared",
        "a prefix came in waves",
        "a reset met a device load",
        "a reset met a device store",
        "a reset met a tier load",
        "a reset met a tier store",
        "a reset took what was promised",
        "a result came twice",
        "a result came from another tier",
        "a tier wrote into quarantined rows",
        "a whole block of another epoch was caught",
        "a whole block of another key was caught",
        "no room for a store",
        "the device failed a store",
        "the device took too long",
        "the pool evicted",
        "the quarantine was full",
    ]
)
"""What every large enough set of runs must see at least once."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a run's world is.

    ``max_requests`` bounds those alive at once, ``max_blocks`` their prefixes, ``num_roots`` is the number of different
    first blocks: the fewer, the more is shared.
    """

    num_rows: int
    tiers: Sequence[TierScript]
    limits: PoolLimits
    max_requests: int
    max_blocks: int
    num_roots: int = 3

    @staticmethod
    def draw(random: Random) -> "Shape":
        """A tiny world: little room makes every conflict frequent."""
        num_rows = random.randint(2, 16)
        tiers = [_draw_tier(random, name) for name in "xyz"[: random.randint(1, 3)]]
        limits = PoolLimits(
            max_promotion_rows=max(1, num_rows // random.choice((1, 2, 2, 4))),
            max_cascade_rows=max(1, num_rows // random.choice((1, 2))),
            lease_timeout_s=10.0,
            device_timeout_s=20.0,
        )
        return Shape(
            num_rows=num_rows,
            tiers=tiers,
            limits=limits,
            max_requests=random.randint(1, 6),
            max_blocks=random.randint(2, num_rows + 4),
        )


def _draw_tier(random: Random, name: str) -> TierScript:
    return TierScript(
        name=name,
        resident=random.random() < 0.4,
        remembers=random.choice((4, 1000)),
        shared=random.random() < 0.3,
        obeys_reset=random.random() < 0.5,
        limits=TierLimits(
            lookup_timeout=2.0,
            load_timeout=5.0,
            store_timeout=6.0,
            miss_ttl=random.choice((1.0, 4.0)),
            presence_ttl=random.choice((0.5, 3.0)),
            max_quarantined=random.choice((0.1, 0.5)),
            max_cascade=random.choice((0.25, 1.0)),
            breaker_failures=random.choice((2, 3)),
            breaker_pause=1.0,
            breaker_max_pause=8.0,
        ),
    )


@dataclass(eq=False, slots=True)
class _Request:
    """A request as the engine sees it. ``computed`` leading blocks are on the device."""

    name: str
    keys: list[OffloadKey]
    computed: int = 0
    offered: int = 0
    is_running: bool = False
    load_job: int | None = None


class Simulation:
    """One run. ``seen`` counts the outcomes."""

    def __init__(self, seed: int, shape: Shape | None = None, *, check_every: int = 1) -> None:
        self.random = Random(seed)  # noqa: S311 - replay, not secrecy
        self.shape = Shape.draw(self.random) if shape is None else shape
        self.world = World(
            self.shape.num_rows, self.shape.tiers, limits=self.shape.limits, check_every=check_every
        )
        self.seen: Counter[str] = Counter()
        self.num_requests = 0
        self.num_steps = 0
        self._requests: dict[str, _Request] = {}
        self._keys: dict[str, OffloadKey] = {}
        self._moods = dict.fromkeys(self.world.tiers, "good")
        self._breakers: dict[tuple[str, str], BreakerState] = {}
        self._last_answered: int | None = None
        self._actions, self._weights = self._plan()

    def _plan(self) -> tuple[list[Callable[[], bool]], list[int]]:
        weights: dict[Callable[[], bool], int] = {
            self._new_request: 30,
            self._ask: 60,
            self._compute: 40,
            self._end_device_transfer: 50,
            self._end_step: 25,
            self._answer: 80,
            self._pass_time: 20,
            self._end_request: 40,
            self._preempt: 5,
            self._misbehave: 3,
            self._change_a_tier: 6,
            self._lose_a_block: 2,
            self._reset: 1,
        }
        return list(weights), list(accumulate(weights.values()))

    def run(self, steps: int) -> None:
        """Take *steps* steps, then bring everything to rest and check it. Raises ``AssertionError``."""
        for _ in range(steps):
            self.step()
        self.come_to_rest()

    def step(self) -> None:
        """Take one step; the world checks itself at its end."""
        self.num_steps += 1
        while not self.random.choices(self._actions, cum_weights=self._weights)[0]():
            """There was nothing to do of that kind: draw again. Time can always pass."""
        self._watch_tiers()

    def come_to_rest(self) -> None:
        """End everything; then every row is free or evictable, and a whole pool of new blocks fits."""
        world = self.world
        world.settle()
        world.check_at_rest()
        world.new_request("last")
        keys = [
            make_offload_key(hashlib.sha256(b"last%d" % i).digest(), 0) for i in range(world.ledger.num_rows)
        ]
        world.put("last", keys)
        world.settle()
        world.check_at_rest()
        self._count_what_counters_saw()

    # -- the engine

    def _new_request(self) -> bool:
        if len(self._requests) >= self.shape.max_requests:
            return False
        self.num_requests += 1
        name = f"r{self.num_requests}"
        request = _Request(name, self._draw_prefix())
        self._requests[name] = request
        names = list(self.world.tiers)
        restricted = self.random.random() < 0.1
        self.world.new_request(
            name,
            load_tiers=names[1:] if restricted else None,
            store_tiers=names[:1] if restricted else None,
        )
        return True

    def _draw_prefix(self) -> list[OffloadKey]:
        """A path through a tree of blocks: requests share prefixes and part somewhere."""
        path = f"{self.random.randrange(self.shape.num_roots)}:"
        keys = []
        for _ in range(self.random.randint(1, self.shape.max_blocks)):
            path += "0" if self.random.random() < 0.85 else "1"
            if path not in self._keys:
                self._keys[path] = make_offload_key(hashlib.sha256(path.encode()).digest(), 0)
            keys.append(self._keys[path])
        return keys

    def _pick(self, *, is_running: bool) -> _Request | None:
        requests = [r for r in self._requests.values() if r.is_running is is_running and r.load_job is None]
        return self.random.choice(requests) if requests else None

    def _ask(self) -> bool:
        request = self._pick(is_running=False)
        if request is None:
            return False
        found = self.world.lookup(request.name, request.keys)
        self._watch_lookup(request, found)
        if found.is_settled or self.random.random() < 0.05:
            request.is_running = True
            if found.hits and self.random.random() < 0.9:
                self._load(request, found)
        return True

    def _load(self, request: _Request, found: Lookup) -> None:
        if self.random.random() < 0.01:
            self._reset()
        prepared = self.world.prepare_load(request.name, request.keys[: found.hits])
        if len(prepared.keys) < found.hits:
            self.seen["a reset took what was promised"] += 1
        if prepared.keys:
            request.load_job = prepared.job_id
            request.computed = request.offered = len(prepared.keys)

    def _compute(self) -> bool:
        request = self._pick(is_running=True)
        if request is None or request.offered == len(request.keys):
            return False
        request.computed = min(len(request.keys), request.computed + self.random.randint(1, 3))
        prepared = self.world.prepare_store(request.name, request.keys[request.offered : request.computed])
        if prepared is None:
            self.seen["no room for a store"] += 1
        else:
            request.offered = request.computed
        return True

    def _end_device_transfer(self) -> bool:
        if not self.world.transfers:
            return False
        job_id = self.random.choice(list(self.world.transfers))
        transfer = self.world.transfers[job_id]
        if transfer.is_store:
            success = self.random.random() < 0.9
            self.seen["the device failed a store"] += not success
            self.seen["the device took too long"] += self.world.coordinator.state.jobs[job_id].overdue
            self.world.complete_store(job_id, success=success)
            return True
        self.world.complete_load(job_id)
        request = self._requests.get(transfer.request)
        if request is not None and request.load_job == job_id:
            request.load_job = None
        return True

    def _end_step(self) -> bool:
        self.world.end_step()
        return True

    def _end_request(self) -> bool:
        if not self._requests:
            return False
        request = self.random.choice(list(self._requests.values()))
        if request.offered < len(request.keys) and self.random.random() < 0.9:
            return False
        state = self.world.coordinator.state
        known = state.requests[request.name]
        planned = [block for blocks in known.planned.values() for block in blocks]
        self.seen["a finish waited for a device store"] += known.device_stores > 0
        self.world.finish(request.name)
        kept = any(block.state is BlockState.ARRIVING for block in planned)
        self.seen["a planned promotion was handed over"] += kept
        del self._requests[request.name]
        return True

    def _preempt(self) -> bool:
        request = self._pick(is_running=True)
        if request is None:
            return False
        request.is_running = False
        request.computed = request.offered = 0
        return True

    # -- the tiers

    def _answer(self) -> bool:
        running = [r for r in self.world.running.values() if self._moods[r.plan.tier] != "silent"]
        if not running:
            return False
        job = self.random.choice(running)
        answers = LOOKUP_ANSWERS if job.hook is JobHook.LOOKUP else MOVE_ANSWERS
        honest = 0.97 if self._moods[job.plan.tier] == "good" else 0.3
        answer = Answer.OK if self.random.random() < honest else self.random.choice(answers)
        chosen = [key for key in job.plan.keys if self.random.random() < 0.5]
        self._watch_answer(job)
        loaded = self._loaded(job)
        self.world.answer(job.plan.id, answer, chosen)
        self._last_answered = job.plan.id
        if job.hook is JobHook.LOAD and 0 < self._loaded(job) - loaded < len(job.plan.keys):
            self.seen["a load brought only a part"] += 1
        return True

    def _loaded(self, job: RunningJob) -> int:
        return self.world.coordinator.counters.tiers[job.plan.tier].loaded

    def _pass_time(self) -> bool:
        state = self.world.coordinator.state
        leases = sum(len(request.leases) for request in state.requests.values())
        longest = self.random.choice((0.1, 0.1, 0.1, 1.0, 1.0, 3.0, 12.0))
        self.world.advance(self.random.uniform(0, longest))
        left = sum(len(request.leases) for request in state.requests.values())
        self.seen["a lease lapsed"] += left < leases
        return True

    def _misbehave(self) -> bool:
        name = self.random.choice(list(self.world.tiers))
        running = self.world.running
        match self.random.choice(("fault", "twice", "foreign", "unknown", "scribble", "scribble")):
            case "fault":
                self.world.fault(name)
            case "twice" if self._last_answered is not None:
                self.seen["a result came twice"] += 1
                self.world.answer_again(self._last_answered)
            case "foreign" if any(job.plan.tier != name for job in running.values()):
                self.seen["a result came from another tier"] += 1
                job_id = self.random.choice([i for i, job in running.items() if job.plan.tier != name])
                self.world.report(name, JobResult(job_id=job_id, present=[True]))
            case "scribble" if loads := self.world.jobs(JobHook.LOAD):
                job_id = self.random.choice(loads)
                self.world.scribble(job_id)
                overdue = self.world.coordinator.state.jobs[job_id].overdue
                self.seen["a tier wrote into quarantined rows"] += overdue
            case "unknown":
                self.world.report(name, JobResult(job_id=self.random.randint(10**9, 10**10)))
            case _:
                return False
        return True

    def _change_a_tier(self) -> bool:
        name = self.random.choice(list(self.world.tiers))
        if not self.world.coordinator.state.tiers[name].serving:
            self.world.tier_ready(name)
        else:
            self._moods[name] = self.random.choice(("good", "good", "good", "bad", "silent"))
        return True

    def _lose_a_block(self) -> bool:
        tier = self.random.choice(list(self.world.tiers.values()))
        if not tier.contents:
            return False
        del tier.contents[self.random.choice(list(tier.contents))]
        return True

    def _reset(self) -> bool:
        world = self.world
        for transfer in world.transfers.values():
            self.seen["a reset met a device store" if transfer.is_store else "a reset met a device load"] += 1
        self.seen["a reset met a tier load"] += bool(world.jobs(JobHook.LOAD))
        self.seen["a reset met a tier store"] += bool(world.jobs(JobHook.STORE))
        world.reset(tiers=self.random.random() < 0.5, ready=self.random.random() < 0.5)
        for request in self._requests.values():
            request.offered = 0
        return True

    # -- what was seen

    def _watch_lookup(self, request: _Request, found: Lookup) -> None:
        state = self.world.coordinator.state
        for answer in set(found.states):
            self.seen[f"lookup {answer.value}"] += 1
        if LookupState.RETRY in found.states and state.requests[request.name].promoting:
            self.seen["a prefix came in waves"] += 1
        if LookupState.HIT_PENDING in found.states:
            pending = {
                k for k, s in zip(request.keys, found.states, strict=False) if s is LookupState.HIT_PENDING
            }
            self.seen["a promotion was shared"] += any(
                running.hook is JobHook.LOAD
                and running.plan.request.request_id != request.name
                and not running.is_cancelled
                and not pending.isdisjoint(running.plan.keys)
                for running in self.world.running.values()
            )

    def _watch_answer(self, job: RunningJob) -> None:
        world = self.world
        self.seen["a late result freed its rows"] += job.hook is JobHook.LOAD and job.is_cancelled
        for key, row in zip(job.plan.keys, job.plan.rows, strict=False):
            name = Payload(key, job.epoch)
            if job.hook is JobHook.STORE:
                self.seen["a cascade was read too late"] += world.rows[row].payload != name
                continue
            content = world.tiers[job.plan.tier].contents.get(key)
            if content is not None and not content.proves(name) and not isinstance(content.payload, Junk):
                other = "epoch" if content.payload.key == key else "key"
                self.seen[f"a whole block of another {other} was caught"] += 1

    def _watch_tiers(self) -> None:
        for name, tier in self.world.coordinator.state.tiers.items():
            for kind, breaker in (("load", tier.load_breaker), ("store", tier.store_breaker)):
                before = self._breakers.get((name, kind), BreakerState.CLOSED)
                if breaker.state is before:
                    continue
                self._breakers[name, kind] = breaker.state
                self.seen["a breaker opened"] += breaker.state is BreakerState.OPEN
                self.seen["a breaker closed again"] += breaker.state is BreakerState.CLOSED
            self.seen["the quarantine was full"] += tier.quarantined_rows >= tier.max_quarantined_rows

    def _count_what_counters_saw(self) -> None:
        counters = self.world.coordinator.counters
        self.seen["the pool evicted"] += counters.evicted
        for reason, count in counters.misses.items():
            self.seen[f"miss {reason.value}"] += count
        for tier in counters.tiers.values():
            for counter in fields(TierCounters):
                self.seen[f"tier {counter.name}"] += getattr(tier, counter.name)


@dataclass(slots=True)
class Summary:
    """What a set of runs came to. ``violations`` say each how to replay it."""

    seeds: int = 0
    steps: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def unseen_outcomes(self) -> list[str]:
        """Outcomes that no run saw."""
        return sorted(OUTCOMES - {name for name, count in self.seen.items() if count})

    @property
    def steps_per_s(self) -> int:
        """Steps of the simulation in one second of real time."""
        return round(self.steps / self.seconds) if self.seconds else 0


def run_seeds(first_seed: int, seeds: int, steps: int, shape: Shape | None = None) -> Summary:
    """Run *seeds* runs of *steps* steps each. A run that breaks a rule is written down and the next one goes on."""
    summary = Summary()
    began = time.perf_counter()
    for seed in range(first_seed, first_seed + seeds):
        simulation = Simulation(seed, shape)
        try:
            simulation.run(steps)
        except Exception as error:  # noqa: BLE001 - a KeyError in the coordinator is as much of a violation
            summary.violations.append(
                f"{type(error).__name__}: {error} (seed {seed}, step {simulation.num_steps}; replay: "
                f"python -m kvtier_core.testing.simulation --first-seed {seed} --seeds 1 --steps {steps})"
            )
        summary.seeds += 1
        summary.steps += simulation.num_steps
        summary.seen.update(simulation.seen)
    summary.seconds = time.perf_counter() - began
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit status 1 when a run broke a rule, 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_core.testing.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many runs")
    parser.add_argument("--first-seed", type=int, default=0, help="the first run's seed")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    summary = run_seeds(options.first_seed, options.seeds, options.steps)
    report = {
        "seeds": summary.seeds,
        "steps": summary.steps,
        "steps_per_s": summary.steps_per_s,
        "violations": summary.violations,
        "unseen_outcomes": summary.unseen_outcomes,
    }
    lines = [json.dumps(report)] if options.json else [f"{name}: {value}" for name, value in report.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())
