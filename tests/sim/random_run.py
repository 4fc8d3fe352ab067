"""One seeded random run of a ``World``: an engine whose requests share prefixes, and tiers of changing moods.

One seed is one run, the same on every machine and in every process. This module decides what happens next and sees to
it that everything can be brought to rest at the end; the world checks the rules after every step.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from random import Random

from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.hints import NO_HINTS, Hints
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.ledger import BlockState
from tests.sim.hook_order import InvariantError
from tests.sim.outcomes import Watcher
from tests.sim.scripted import LOOKUP_ANSWERS, MOVE_ANSWERS, Answer, JobHook, RunningJob
from tests.sim.shapes import Shape
from tests.sim.world import MAX_HOLD_S, World


@dataclass(eq=False, slots=True)
class _Request:
    """A request as the engine sees it. ``computed`` leading tokens are on the device."""

    name: str
    keys: tuple[tuple[OffloadKey, ...], ...]  # one a group
    blocks: list[tuple[int, OffloadKey]]
    """Every block of every group, by the token it ends at."""
    num_tokens: int
    computed: int = 0
    offered: int = 0
    """Leading ``blocks`` that have been offered."""
    is_running: bool = False
    load_job: int | None = None


class Simulation:
    """One run. ``watcher.seen`` counts the outcomes."""

    def __init__(self, seed: int, shape: Shape | None = None, *, check_every: int = 1) -> None:
        self.random = Random(seed)
        self.shape = Shape.draw(self.random) if shape is None else shape
        self.world = World(
            self.shape.num_rows,
            self.shape.tiers,
            limits=self.shape.limits,
            groups=self.shape.groups,
            policy=self.shape.policy,
            check_every=check_every,
        )
        if self.shape.recompute_s is not None:
            self.world.coordinator.set_recompute_cost(self.shape.recompute_s)
        self._is_plain = tuple(self.shape.groups) == (GroupShape(),)
        self.watcher = Watcher(self.world)
        self.num_requests = 0
        self.num_steps = 0
        self._requests: dict[str, _Request] = {}
        self._keys: dict[tuple[str, int], OffloadKey] = {}
        self._moods = dict.fromkeys(self.world.tiers, "good")
        self._actions, self._weights = self._plan()

    def _plan(self) -> tuple[list[Callable[[], bool]], list[int]]:
        weights: dict[Callable[[], bool], int] = {
            self._new_request: 30,
            self._ask: 80,
            self._compute: 40,
            self._end_device_transfer: 50,
            self._end_step: 40,
            self._answer: 80,
            self._arrive: 15,
            self._pass_time: 20,
            self._end_request: 40,
            self._ask_for_whole: 6,
            self._preempt: 5,
            self._misbehave: 3,
            self._change_a_tier: 10,
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
        self.watcher.after_step()

    def come_to_rest(self) -> None:
        """End everything; then every row is free or evictable, and a whole pool of new blocks fits."""
        world = self.world
        world.settle()
        world.check_at_rest()
        keys = [
            make_offload_key(hashlib.sha256(b"last%d" % i).digest(), 0) for i in range(world.ledger.num_rows)
        ]
        for number in range(1, self.shape.limits.store_threshold):
            world.new_request(f"last but {number}")
            world.prepare_store(f"last but {number}", keys)
        world.new_request("last")
        world.put("last", keys)
        world.settle()
        world.check_at_rest()
        self.watcher.at_the_end()

    # -- the engine

    def _new_request(self) -> bool:
        if len(self._requests) >= self.shape.max_requests:
            return False
        self.num_requests += 1
        name = f"r{self.num_requests}"
        request = self._draw_request(name)
        self._requests[name] = request
        names = list(self.world.tiers)
        restricted = self.random.random() < 0.1
        self.world.new_request(
            name,
            load_tiers=names[1:] if restricted else None,
            store_tiers=names[:1] if restricted else None,
            remote_decode=self.random.random() < 0.1,
            hints=self._draw_hints() if self.random.random() < 0.3 else NO_HINTS,
        )
        if self.random.random() < 0.2:
            self.world.prefetch(name, request.keys)
        return True

    def _draw_hints(self) -> Hints:
        """Some of each kind. One that drops is to keep nothing."""
        return Hints(
            retain_s=self.random.choice((0.0, 5.0, MAX_HOLD_S)),
            priority=self.random.choice((0, 1, 100)),
            pin_s=self.random.choice((0.0, 0.0, 5.0, MAX_HOLD_S)),
            pin_bytes=self.random.choice((None, 1, 2)),
            drop=self.random.random() < 0.3,
        )

    def _ask_for_whole(self) -> bool:
        """A tier asks for a whole request, soon or late."""
        if not self._requests:
            return False
        request = self.random.choice(list(self._requests.values()))
        self.watcher.note("a tier asked for a whole request late", request.offered > 0)
        self.world.ask_for_whole(self.random.choice(list(self.world.tiers)), request.name)
        return True

    def _draw_request(self, name: str) -> _Request:
        """Its tokens are a path through a tree: requests share prefixes and part somewhere."""
        path = f"{self.random.randrange(self.shape.num_roots)}:"
        num_tokens = self.random.randint(1, self.shape.max_blocks)
        path += "".join("0" if self.random.random() < 0.95 else "1" for _ in range(num_tokens))
        keys = tuple(
            tuple(
                self._key(path[: 2 + end], index)
                for end in range(shape.tokens_per_block, num_tokens + 1, shape.tokens_per_block)
            )
            for index, shape in enumerate(self.shape.groups)
        )
        blocks = [
            ((number + 1) * shape.tokens_per_block, key)
            for shape, of_group in zip(self.shape.groups, keys, strict=True)
            for number, key in enumerate(of_group)
        ]
        blocks.sort(key=itemgetter(0))
        return _Request(name, keys, blocks, num_tokens)

    def _key(self, path: str, group: int) -> OffloadKey:
        if (path, group) not in self._keys:
            self._keys[path, group] = make_offload_key(hashlib.sha256(path.encode()).digest(), group)
        return self._keys[path, group]

    def _pick(self, *, is_running: bool) -> _Request | None:
        requests = [r for r in self._requests.values() if r.is_running is is_running and r.load_job is None]
        return self.random.choice(requests) if requests else None

    def _ask(self) -> bool:
        request = self._pick(is_running=False)
        if request is None:
            return False
        self.world.begin(request.name)
        if self._is_plain:
            answer = self.world.lookup(request.name, request.keys[0])
            self.watcher.saw_lookup(request.name, request.keys[0], answer)
            found = answer.found
        else:
            found = self.world.find_end_point(request.name, request.keys)
            self.watcher.saw_end_point(found)
        hits = found.ready_tokens
        if found.is_settled or self.random.random() < 0.05:
            request.is_running = True
            if hits and self.random.random() < 0.9:
                self._load(request, hits, is_promised=self._is_plain or found.is_settled)
        return True

    def _load(self, request: _Request, hits: int, *, is_promised: bool) -> None:
        was_reset = self.random.random() < 0.01
        if was_reset:
            self._reset()
        prepared, loaded = self.world.load_end_point(request.name, request.keys, hits)
        self.watcher.note("a reset took what was promised", loaded < hits and was_reset)
        if loaded < hits and is_promised and not was_reset:
            raise InvariantError(f"{request.name} was promised {hits} tokens and got {loaded} (K3-O1)")
        if prepared.keys:
            request.load_job = prepared.job_id
            request.computed = loaded

    def _compute(self) -> bool:
        request = self._pick(is_running=True)
        if request is None or request.offered == len(request.blocks):
            return False
        if request.offered == 0 and not self.world.coordinator.is_request_level(request.name):
            request.offered = self._blocks_within(request)
        request.computed = min(request.num_tokens, request.computed + self.random.randint(1, 3))
        end = self._blocks_within(request)
        offer = [key for _, key in request.blocks[request.offered : end]]
        may_store = self.world.coordinator.may_store(request.name)
        self.watcher.note("what a reset met was not stored", bool(offer) and not may_store)
        prepared = self.world.prepare_store(request.name, offer)
        if prepared is None:
            self.watcher.note("no room for a store")
        else:
            request.offered = end
        return True

    @staticmethod
    def _blocks_within(request: _Request) -> int:
        return bisect_right(request.blocks, request.computed, key=itemgetter(0))

    def _end_device_transfer(self) -> bool:
        if not self.world.transfers:
            return False
        job_id = self.random.choice(list(self.world.transfers))
        transfer = self.world.transfers[job_id]
        if transfer.is_store:
            success = self.random.random() < 0.9
            self.watcher.note("the device failed a store", not success)
            self.watcher.note("the device took too long", self.world.coordinator.state.jobs[job_id].overdue)
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
        state = self.world.coordinator.state
        aborts = state.requests[request.name] in state.planned and self.random.random() < 0.5
        if not aborts and request.offered < len(request.blocks) and self.random.random() < 0.9:
            return False
        known = state.requests[request.name]
        planned = [block for blocks in state.planned.get(known, {}).values() for block in blocks]
        self.watcher.note("a finish waited for a device store", known.device_stores > 0)
        self.watcher.note("a finish waited for late blocks", known.late > 0)
        to_drop = [key for key in known.to_drop if self.world.ledger.find(key) is not None]
        self.world.finish(request.name)
        dropped = any(self.world.ledger.find(key) is None for key in to_drop)
        self.watcher.note("what a request stored was dropped", dropped)
        kept = any(block.state is BlockState.ARRIVING for block in planned)
        self.watcher.note("a planned promotion was handed over", kept)
        del self._requests[request.name]
        return True

    def _preempt(self) -> bool:
        request = self._pick(is_running=True)
        if request is None:
            return False
        request.is_running = False
        request.computed = request.offered = 0
        self.world.preempt(request.name)
        return True

    # -- the tiers

    def _answer(self) -> bool:
        running = [r for r in self.world.running.values() if self._moods[r.tier] != "silent"]
        if not running:
            return False
        job = self.random.choice(running)
        answers = LOOKUP_ANSWERS if job.hook is JobHook.LOOKUP else MOVE_ANSWERS
        honest = 0.97 if self._moods[job.tier] == "good" else 0.3
        answer = Answer.OK if self.random.random() < honest else self.random.choice(answers)
        chosen = [key for key in job.job.keys if self.random.random() < 0.5]
        self.watcher.before_answer(job)
        loaded = self._loaded(job)
        self.world.answer(job.job.id, answer, chosen)
        if job.hook is JobHook.LOAD and 0 < self._loaded(job) - loaded < len(job.job.keys):
            self.watcher.note("a load brought only a part")
        is_part = answer is Answer.MISSING and 0 < len(chosen) < len(job.job.keys)
        self.watcher.note("a lookup was answered in part", job.hook is JobHook.LOOKUP and is_part)
        return True

    def _arrive(self) -> bool:
        """A tier says that some blocks of a load have come; the rest is still to come."""
        loads = self.world.jobs(JobHook.LOAD)
        if not loads:
            return False
        job = self.world.running[self.random.choice(loads)]
        self.world.arrive(job.job.id, [key for key in job.job.keys if self.random.random() < 0.5])
        return True

    def _loaded(self, job: RunningJob) -> int:
        return self.world.coordinator.counters.tiers[job.tier].loaded

    def _pass_time(self) -> bool:
        state = self.world.coordinator.state
        leases = sum(len(request.leases) for request in state.requests.values())
        loaded = self._all_loaded()
        longest = self.random.choice((0.1, 0.1, 0.1, 1.0, 1.0, 3.0, 12.0))
        self.world.advance(self.random.uniform(0, longest))
        self.watcher.note("a part of an overdue load had come", self._all_loaded() > loaded)
        left = sum(len(request.leases) for request in state.requests.values())
        self.watcher.note("a lease lapsed", left < leases)
        return True

    def _all_loaded(self) -> int:
        return sum(tier.loaded for tier in self.world.coordinator.counters.tiers.values())

    def _misbehave(self) -> bool:
        name = self.random.choice(list(self.world.tiers))
        match self.random.choice(("fault", "scribble", "scribble")):
            case "fault":
                self.world.fault(name)
            case "scribble" if loads := self.world.jobs(JobHook.LOAD):
                job_id = self.random.choice(loads)
                self.world.scribble(job_id)
                overdue = self.world.coordinator.state.jobs[job_id].overdue
                self.watcher.note("a tier wrote into quarantined rows", overdue)
            case _:
                return False
        return True

    def _change_a_tier(self) -> bool:
        """A tier begins to serve the current epoch, or its mood changes."""
        tiers = self.world.coordinator.state.tiers
        waiting = [name for name, tier in tiers.items() if not tier.serving]
        if waiting:
            self.world.tier_ready(self.random.choice(waiting))
        else:
            moods = ("good", "good", "good", "good", "bad", "silent")
            self._moods[self.random.choice(list(tiers))] = self.random.choice(moods)
        return True

    def _lose_a_block(self) -> bool:
        tier = self.random.choice(list(self.world.tiers.values()))
        if not tier.contents:
            return False
        del tier.contents[self.random.choice(list(tier.contents))]
        return True

    def _reset(self) -> bool:
        world = self.world
        self.watcher.before_reset()
        world.reset(tiers=self.random.random() < 0.5, ready=self.random.random() < 0.5)
        for request in self._requests.values():
            request.offered = 0
        return True
