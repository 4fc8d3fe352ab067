"""kvtier's side of the hot-path benchmark, and the floor: a bare dict or OrderedDict doing the same work on the keys.

Each case prepares its round, then times only the calls that an engine's thread would make, in nanoseconds.
"""

from collections import OrderedDict
from collections.abc import Sequence
from queue import SimpleQueue
from time import thread_time_ns

from hot_path_keys import Keys, copies

from kvtier_core.coordinator.actions import Action, SealRows, SubmitJob
from kvtier_core.coordinator.coordinator import Coordinator
from kvtier_core.coordinator.endpoints import GroupShape
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.coordinator.results import Finished
from kvtier_core.coordinator.tier_record import TierSpec
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.presence import PresenceSet
from kvtier_core.plugins import load_policy
from kvtier_core.tier_settings import TierLimits
from kvtier_core.values import JobResult, LookupState, RequestInfo, TierInfo
from kvtier_vllm.order import Asked

NOW = 1.0
HIT = LookupState.HIT


def _typed(keys: Sequence[bytes]) -> list[OffloadKey]:
    return [OffloadKey(key) for key in keys]


class Pool:
    """A coordinator whose pool is full, with *tiers* behind it, none of which answers by itself."""

    def __init__(self, num_blocks: int, seed: int, policy: str = "lru", tiers: Sequence[str] = ()) -> None:
        self.keys = Keys(num_blocks, seed)
        limits = PoolLimits(
            max_promotion_rows=num_blocks // 2,
            max_cascade_rows=num_blocks,
            lease_timeout_s=30.0,
            device_timeout_s=60.0,
        )
        tier_limits = TierLimits(max_cascade=1.0)
        specs = [TierSpec(name=name, info=TierInfo(medium="disk"), limits=tier_limits) for name in tiers]
        self.coordinator = Coordinator(num_blocks, load_policy(policy)(num_blocks), specs, limits)
        self._requests = 0
        for begin in range(0, num_blocks, 1000):
            self.store(_typed(copies(self.keys.resident[begin : begin + 1000])))
        self.presence = PresenceSet(10 * num_blocks, complete=True)
        self.presence.add(_typed(copies(self.keys.resident)))
        for name in tiers:
            self.coordinator.tier_ready(name, self.presence)
        # What the tiers missed before they came they hold: each tick looks at a part of it, and gives them nothing.
        while any(tier.missed for tier in self.coordinator.state.tiers.values()):
            self.coordinator.tick(NOW)
        self.actions()

    def request(self) -> str:
        """Begin a request."""
        self._requests += 1
        name = f"r{self._requests}"
        self.coordinator.new_request(RequestInfo(request_id=name), NOW)
        return name

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store new blocks in the pool."""
        request = self.request()
        stored = self.coordinator.prepare_store(request, keys, NOW)
        assert stored is not None
        assert len(stored.keys) == len(keys)
        self.coordinator.complete_store(stored.job_id, success=True, now=NOW)
        self.coordinator.request_finished(request)

    def actions(self) -> list[Action]:
        """What the coordinator wants done."""
        return self.coordinator.take_actions()

    # -- cases

    def lookup_hit(self, count: int) -> int:
        """One lookup of resident keys."""
        keys, request = _typed(self.keys.some_resident(count)), self.request()
        began = thread_time_ns()
        found = self.coordinator.lookup(request, (keys,), NOW)
        took = thread_time_ns() - began
        assert found.ready_tokens == count
        self.coordinator.request_finished(request)
        self.actions()
        return took

    def lookup_hit_per_key(self, count: int) -> int:
        """The same key by key, as vLLM asks, and as its adapter answers: from one lookup a step."""
        keys, request = _typed(self.keys.some_resident(count)), self.request()
        positions = dict.fromkeys(keys, 0)  # vLLM's own map
        began = thread_time_ns()
        asked = Asked(
            positions, [0], [GroupShape()], lambda keys: self.coordinator.lookup(request, keys, NOW)
        )
        found = [asked.answer(key, 1) for key in keys]
        took = thread_time_ns() - began
        assert found == [HIT] * count
        self.coordinator.request_finished(request)
        self.actions()
        return took

    def lookup_miss(self, count: int) -> int:
        """One lookup of keys that neither the pool nor the tier behind it has."""
        keys, request = _typed(self.keys.absent(count)), self.request()
        began = thread_time_ns()
        found = self.coordinator.lookup(request, (keys,), NOW)
        took = thread_time_ns() - began
        assert found.ready_tokens == 0
        assert found.is_settled, "a resident tier knows at once"
        self.coordinator.request_finished(request)
        self.actions()
        return took

    def load(self, count: int) -> int:
        """Prepare and complete a device load of blocks that were looked up before."""
        keys, request = _typed(self.keys.some_resident(count)), self.request()
        self.coordinator.lookup(request, (keys,), NOW)
        began = thread_time_ns()
        prepared = self.coordinator.prepare_load(request, keys)
        self.coordinator.complete_load(prepared.job_id)
        took = thread_time_ns() - began
        assert len(prepared.rows) == count
        self.coordinator.request_finished(request)
        self.actions()
        return took

    def store_evict(self, count: int) -> int:
        """Prepare and complete a device store of new blocks; as many others have to leave."""
        keys, request = _typed(self.keys.absent(count)), self.request()
        began = thread_time_ns()
        prepared = self.coordinator.prepare_store(request, keys, NOW)
        assert prepared is not None
        self.coordinator.complete_store(prepared.job_id, success=True, now=NOW)
        took = thread_time_ns() - began
        assert len(prepared.evicted) == count
        self.coordinator.request_finished(request)
        self.actions()
        return took

    def cascade_hold(self, count: int) -> int:
        """Complete a device store whose blocks go on to a tier, up to handing them to the thread that takes over.

        The keys were looked up before, as by an engine that found it had to compute them.
        """
        keys, request = _typed(self.keys.absent(count)), self.request()
        self.coordinator.lookup(request, (keys,), NOW)
        prepared = self.coordinator.prepare_store(request, keys, NOW)
        assert prepared is not None
        queue: SimpleQueue[Action] = SimpleQueue()
        began = thread_time_ns()
        self.coordinator.complete_store(prepared.job_id, success=True, now=NOW)
        for action in self.coordinator.take_actions():
            queue.put(action)
        took = thread_time_ns() - began
        while not queue.empty():
            action = queue.get()
            if isinstance(action, SealRows):
                self.coordinator.on_sealed(action.job.id)
            elif isinstance(action, SubmitJob):
                self.coordinator.on_finished(Finished(JobResult(job_id=action.job.id)), NOW)
        self.coordinator.request_finished(request)
        self.actions()
        return took


class IdleSteps:
    """A coordinator with requests that all wait for a tier's answer."""

    def __init__(self, num_requests: int, num_keys: int, num_blocks: int, seed: int) -> None:
        self._pool = Pool(num_blocks, seed, tiers=["slow"])
        self._pool.coordinator.tier_ready("slow", None)
        self._waiting = []
        for _ in range(num_requests):
            keys, request = (tuple(_typed(self._pool.keys.absent(num_keys))),), self._pool.request()
            assert not self._pool.coordinator.lookup(request, keys, NOW).is_settled
            self._waiting.append((request, keys))
        self._pool.coordinator.end_step(0, NOW)
        self._pool.actions()

    def step(self) -> int:
        """A step in which nothing happens."""
        coordinator = self._pool.coordinator
        began = thread_time_ns()
        coordinator.tick(NOW)
        coordinator.end_step(1, NOW)
        actions = coordinator.take_actions()
        took = thread_time_ns() - began
        assert not actions
        return took

    def step_with_lookups(self) -> int:
        """The same with every request asking again."""
        coordinator = self._pool.coordinator
        began = thread_time_ns()
        coordinator.tick(NOW)
        for request, keys in self._waiting:
            coordinator.lookup(request, keys, NOW)
        coordinator.end_step(1, NOW)
        actions = coordinator.take_actions()
        took = thread_time_ns() - began
        assert not actions
        return took


class Floor:
    """The same work on the keys by a bare dict, or an OrderedDict where something has to leave."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.keys = Keys(num_blocks, seed)
        self._table = {key: row for row, key in enumerate(self.keys.resident)}
        self._order = OrderedDict(self._table)

    def lookup_hit(self, count: int) -> int:
        """Find the row of each key."""
        keys, table = self.keys.some_resident(count), self._table
        began = thread_time_ns()
        rows = [table[key] for key in keys]
        took = thread_time_ns() - began
        assert len(rows) == count
        return took

    def store_evict(self, count: int) -> int:
        """For each key that is not there let the oldest one go, enter the new one in its row, and list both."""
        keys, order = self.keys.absent(count), self._order
        began = thread_time_ns()
        rows, evicted = [], []
        for key in keys:
            if key not in order:
                oldest, row = order.popitem(last=False)
                order[key] = row
                rows.append(row)
                evicted.append(oldest)
        took = thread_time_ns() - began
        assert len(rows) == len(evicted) == count
        return took
