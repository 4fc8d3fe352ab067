"""The scheduler side: vLLM's questions, answered by kvtier's coordinator.

Translates between vLLM's calls, which name sets of keys, and the coordinator's jobs; remembers per request what one
batched lookup said, for as long as the step lasts. Decides nothing about blocks, does no I/O and never waits but in
``reset_cache`` and ``shutdown``, a moment at the end of a step that has nothing to run, and for the first look at the
files of a LoRA adapter that vLLM is about to read. Runs on the scheduler's thread.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_core.engine import LookupState, OffloadKey, TierManager
from kvtier_core.transfer import Direction, Pool
from kvtier_vllm.adapter_waits import AdapterWait, UnprovenStores
from kvtier_vllm.adapters import KeyName, KeyNames
from kvtier_vllm.client_calls import CALLS
from kvtier_vllm.figures import Figures
from kvtier_vllm.idle import Waiters
from kvtier_vllm.kv_events import EventTranslator
from kvtier_vllm.order import Asked
from kvtier_vllm.places import TierPlace
from kvtier_vllm.requests import begin_request, hints_of, keys_asked, keys_of_prompt, positions_of
from kvtier_vllm.stats import take_stats
from kvtier_vllm.steps import STEPS
from kvtier_vllm.turns import Turns
from kvtier_vllm.unfinished import Unfinished
from kvtier_vllm.worker import PoolRows

_log = logging.getLogger("kvtier.vllm")
_RESULTS = {
    LookupState.HIT: LookupResult.HIT,
    LookupState.HIT_PENDING: LookupResult.HIT_PENDING,
    LookupState.RETRY: LookupResult.RETRY,
    LookupState.MISS: LookupResult.MISS,
}
_PENDING = (LookupState.HIT_PENDING, LookupState.RETRY)


@dataclass(eq=False)
class _Request:
    """One request, carried by vLLM's own context of it."""

    id: str
    turns: Turns
    wait: AdapterWait
    name: KeyName | None = None
    """Gives kvtier's key for vLLM's; ``None`` while nothing says what the adapter is."""
    asked: Asked | None = None
    """There once the keys have names."""
    sources: Mapping[OffloadKey, str] = field(default_factory=dict)
    """Where each key of the last load came from: ``pool`` or a tier's name."""


class KvtierManager(OffloadingManager):
    """Implements vLLM's manager on a ``TierManager``, whose pool it closes at the end."""

    def __init__(
        self,
        tiers: TierManager,
        pool: Pool,
        places: Mapping[str, TierPlace],
        shutdown_timeout_s: float,
        *,
        tokens_per_hash: int,
        has_lora: bool = False,
        tells_events: bool = False,
    ) -> None:
        self._tiers = tiers
        self._pool = pool
        self._places = places
        self._any_asks_for_requests = any(place.asks_for_requests for place in places.values())
        self._shutdown_timeout = shutdown_timeout_s
        self._unfinished = Unfinished(pool.control)
        self._is_prefix = len(tiers.group_shapes) == 1 and tiers.group_shapes[0].window is None
        self._figures = Figures(tiers)
        self._tokens_per_hash = tokens_per_hash
        self._has_lora = has_lora
        self._names = KeyNames(has_lora=has_lora)
        self._events = EventTranslator(places, self._names.vllms) if tells_events else None
        self._live: dict[str, _Request] = {}
        """The requests that are not over, by vLLM's ids."""
        self._loads: dict[_Request, int] = {}
        self._stores: dict[tuple[_Request, frozenset[OffloadKey]], deque[int]] = defaultdict(deque)
        """Store jobs under way, oldest first. vLLM names a job by its keys alone."""
        self._unproven = UnprovenStores()
        self._numbers = count(1)
        self._step = 0
        self._holder = CALLS.watch(tiers)
        self._cost = STEPS.watch(tiers.set_recompute_cost)
        self._waiters = Waiters()
        self._has_ended = False
        """Whether a worker can't copy any more: then nothing is stored or loaded."""
        self._is_closed = False

    # -- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request begins, under an id of our own: vLLM may use one again before its transfers are over."""
        self._holder.holds_nothing = False
        request_id = f"{req_context.req_id}#{next(self._numbers)}"
        adapter = self._holder.adapter_of(req_context.req_id) if self._has_lora else None
        request = _Request(request_id, Turns(is_prefix=self._is_prefix), AdapterWait(adapter))
        req_context.set_state(request)
        self._live[req_context.req_id] = request
        self._waiters.begin(request)
        info = begin_request(
            self._tiers,
            request_id,
            req_context,
            self._allowed(req_context.load_tier_filter),
            hints_of(req_context),
        )
        if info.hints.prefetch:
            self._prefetch(request, req_context)
        # Request level lets vLLM offer what the device or the pool holds as well. The coordinator decides what of it
        # goes where.
        offers_all = info.wants_remote_decode or info.hints.keeps or self._any_asks_for_requests
        return RequestOffloadingContext(
            OffloadPolicy.REQUEST_LEVEL if offers_all else OffloadPolicy.CHUNK_LEVEL
        )

    def _prefetch(self, request: _Request, req_context: ReqContext) -> None:
        """Bring its prompt to the pool while it waits in vLLM's queue, where it is known what its keys are."""
        name = self._names.of(request.wait.adapter)
        hashes = self._holder.hashes_of(req_context.req_id)
        if name is not None and hashes:
            self._tiers.prefetch(request.id, keys_of_prompt(self._tiers, hashes, self._tokens_per_hash, name))

    def _asked(self, request: _Request, req_context: ReqContext) -> Asked | None:
        """Its keys; ``None`` while nothing says what its adapter is, and once that is in doubt."""
        if request.asked is None:
            request.name = self._names.of(request.wait.adapter)
            if request.name is not None:
                request.asked = keys_asked(self._tiers, request.id, req_context, request.name)
        elif request.wait.adapter is not None and request.wait.adapter.identity is None:
            return None
        return request.asked

    def _allowed(self, chosen: TierFilter) -> Sequence[str] | None:
        """The tiers that a request's ``kv_load_tiers`` lets it load from, ``None`` for all. The pool always answers."""
        if chosen is TierFilter.ALL:
            return None
        return [name for name, place in self._places.items() if chosen.allows(place.medium, place.locality)]

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No submit for this request follows; transfers under way may end later."""
        request = _request(req_context)
        if self._live.get(req_context.req_id) is request:
            del self._live[req_context.req_id]
        self._waiters.end(request)
        self._tiers.request_finished(request.id)

    # -- loads

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer for one key, from one lookup of all the request's keys per step. No I/O."""
        request = _request(req_context)
        if not request.turns.has_asked(self._step):
            self._tiers.request_begins(request.id)
            request.wait.ask()
        if request.turns.must_wait(self._step):
            return LookupResult.RETRY
        state = self._answer(key, request, req_context)
        request.turns.tell(state)
        if state in _PENDING:
            self._waiters.wait(request)
        return _RESULTS[state]

    def _answer(self, key: OffloadKey, request: _Request, req_context: ReqContext) -> LookupState:
        if self._has_ended:
            return LookupState.MISS
        if not request.wait.is_known:
            return LookupState.RETRY if request.wait.must_wait else LookupState.MISS
        asked = self._asked(request, req_context)
        return LookupState.MISS if asked is None else asked.answer(key, self._step)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Where a key of the request's last load came from."""
        place = self._places.get(_request(req_context).sources.get(key, "pool"))
        return CacheHitSource.HOST if place is None else place.hit_source

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin the rows of *keys*, which this step's lookups promised.

        Raises ``RuntimeError`` when one is gone all the same: vLLM can't take back the load, so the engine must stop.
        """
        request = _request(req_context)
        assert request.name is not None
        wanted = self._in_prompt_order(keys, req_context)
        prepared = self._tiers.reserve_load(request.id, list(map(request.name, wanted)))
        if len(prepared.keys) != len(keys):
            raise RuntimeError(
                f"request {req_context.req_id!r}: {len(keys)} blocks were promised and {len(prepared.keys)} are "
                "there: please report this"
            )
        loaded = list(map(self._names.vllms, prepared.keys))
        request.sources = dict(zip(loaded, prepared.sources, strict=True))
        request.turns.load()
        self._loads[request] = prepared.job_id
        self._unfinished.count(Direction.LOAD)
        rows = dict(zip(loaded, prepared.rows, strict=True))
        return PoolRows([rows[key] for key in keys])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """All workers have loaded."""
        self._tiers.commit_load(self._loads.pop(_request(req_context)))

    # -- stores

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Rows for those of *keys* that are new, in their order; ``None`` when the room can't be made.

        Nothing is new of a request that a reset or a preemption met, before it asks again (C04). vLLM offers all of it
        then, and of what a window left behind, the device blocks are others' by now. Nor while its adapter is unknown,
        nor once a worker can't copy any more.
        """
        request = _request(req_context)
        if self._has_ended or self._asked(request, req_context) is None:
            return PrepareStoreOutput(keys_to_store=[], store_spec=PoolRows([]), evicted_keys=[])
        assert request.name is not None
        offered = self._in_prompt_order(keys, req_context)
        prepared = self._tiers.reserve_store(request.id, list(map(request.name, offered)))
        if prepared is None:
            return None
        rows = dict(zip(map(self._names.vllms, prepared.keys), prepared.rows, strict=True))
        if rows:
            self._stores[request, frozenset(rows)].append(prepared.job_id)
            self._unfinished.count(Direction.STORE)
        stored = [key for key in keys if key in rows]
        return PrepareStoreOutput(
            keys_to_store=stored,
            store_spec=PoolRows([rows[key] for key in stored]),
            evicted_keys=list(map(self._names.vllms, prepared.evicted)),
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """All workers have stored, with the adapter that its files hold if these prove to be the same still.

        A worker whose copy failed has said so by now, on the control page alone: vLLM knows no failed transfer.
        """
        self._has_ended = self._has_ended or self._pool.control.has_failed
        success = success and not self._has_ended
        request = _request(req_context)
        name = request, frozenset(keys)
        jobs = self._stores[name]
        job = jobs.popleft()
        if success and request.wait.adapter is not None:
            self._unproven.add(job, request.wait.adapter)
        else:
            self._tiers.commit_store(job, success=success)
        if not jobs:
            del self._stores[name]

    def _in_prompt_order(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Sequence[OffloadKey]:
        """*keys* by their place in the prompt: vLLM names them group by group, and the last leaves first."""
        positions = positions_of(req_context)
        if self._is_prefix or positions is None:
            return list(keys)
        return sorted(keys, key=lambda key: positions.get(key, 0))

    # -- steps

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The step's promotions leave, finished work of the tiers is taken in."""
        STEPS.belongs_here(self._cost)
        for request in filter(None, map(self._live.get, context.new_req_ids)):
            request.turns.run()
            request.wait.run()
        for request in filter(None, map(self._live.get, context.preempted_req_ids)):
            if not request.turns.has_asked(self._step):  # else it has begun anew since
                self._tiers.request_preempted(request.id)
        for request in self._live.values() if self._has_lora else ():
            request.wait.end_step()
        self._end_stores()
        self._tiers.end_step()
        self._step += 1
        if pause_s := self._waiters.end_step(self._loads):
            self._tiers.wait(pause_s)

    def has_pending_work(self) -> bool:
        """Whether the engine has to go on stepping.

        That is so while a reset's transfers are not over, and while stores wait to be proven or made up for. Tiers go
        on by themselves; what they finished is taken in with the next request.
        """
        return bool(self._unfinished) or bool(self._unproven) or self._tiers.is_catching_up

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What changed in the pool and the tiers since the last call, where vLLM's KV events are on."""
        return () if self._events is None else self._events.translate(self._tiers.take_events())

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What kvtier counted since the last call."""
        return take_stats(self._figures)

    def _end_stores(self) -> None:
        """Of adapters whose files have been looked at since, and what a reset left behind."""
        for job, is_right in self._unproven.take_proven():
            self._tiers.commit_store(job, success=is_right)
        for direction, job in self._unfinished.take_settled():
            if direction is Direction.LOAD:
                self._tiers.commit_load(job)
            else:
                self._tiers.commit_store(job, success=False)

    # -- reset and end

    def reset_cache(self) -> None:
        """Nothing stored so far answers any more (C34). vLLM forgets its transfers, so we remember them.

        Waits for the copies that the workers have been handed: vLLM may be about to sleep, and give the KV memory up.
        """
        self._unfinished.leave(
            {
                Direction.LOAD: list(self._loads.values()),
                Direction.STORE: [job for jobs in self._stores.values() for job in jobs],
            }
        )
        self._loads.clear()
        self._stores.clear()
        for job in self._unproven.take_all():
            self._tiers.commit_store(job, success=False)
        self._tiers.reset_cache()
        self._step += 1
        if not self._pool.wait_for_copies(self._shutdown_timeout):
            _log.warning(
                "device copies still run %g s after the reset of the cache: KV memory that is given up now, by a "
                "sleep, may be touched by them",
                self._shutdown_timeout,
            )

    def shutdown(self) -> None:
        """Shut the tiers down and let go of the pool. Twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        CALLS.unwatch(self._holder)
        if self._tiers.shutdown(self._shutdown_timeout):
            self._pool.close()
        else:
            _log.warning("a tier did not shut down in %g s: the pool stays mapped", self._shutdown_timeout)


def _request(context: ReqContext) -> _Request:
    request = context.get_state(_Request)
    assert isinstance(request, _Request), f"request {context.req_id!r} was never begun"
    return request
