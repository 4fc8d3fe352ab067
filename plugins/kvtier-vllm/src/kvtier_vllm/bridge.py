"""``KvtierTier``: kvtier's tiers as one secondary tier of vLLM's own ``TieringOffloadingSpec``.

For those who keep vLLM's primary tier and its policies and want what is behind it from kvtier. Blocks pass through a
small pool of kvtier's own (the ``[pool]`` of the settings), where they get their proof on the way out and are checked
on the way in: a row of vLLM's has no room for one. The price is one more copy in host memory, on a thread of its own.

vLLM tells a tier nothing of the weights, draft model, configuration and layout of what it stores. Without the
option ``kvtier_identity``, a text that stands for all of them, nothing is reused by another run. Of the hash algorithm
it sees the length of the hashes: ones that are not cryptographic never reach a tier that outlives the engine.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingParallelConfig
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier_core import ConfigError, PoolError
from kvtier_core.engine import (
    GroupSpec,
    LookupState,
    Namespace,
    OffloadKey,
    get_offload_block_hash,
    lasting_tiers,
    open_manager,
    plan_geometry,
    why_nothing_lasts,
)
from kvtier_core.transfer import Pool
from kvtier_vllm.client_calls import CALLS
from kvtier_vllm.facts import Workers
from kvtier_vllm.failed_start import leaving_nothing
from kvtier_vllm.neighbours import count_neighbours
from kvtier_vllm.options import CONFIG_OPTION, read_tier_options
from kvtier_vllm.order import Asked
from kvtier_vllm.refusals import CRYPTOGRAPHIC_HASHES, check_workers
from kvtier_vllm.requests import begin_request, keys_asked

_log = logging.getLogger("kvtier.vllm")
_HASH_BYTES = 32
"""Of vLLM's cryptographic hashes; the others are shorter."""
_RESULTS = {
    LookupState.HIT: LookupResult.HIT,
    LookupState.HIT_PENDING: LookupResult.RETRY,  # on its way into kvtier's pool: not vLLM's pending
    LookupState.RETRY: LookupResult.RETRY,
    LookupState.MISS: LookupResult.MISS,
}


@dataclass(eq=False)
class _Request:
    id: str
    asked: Asked
    has_adapter: bool


@dataclass(frozen=True)
class _Copy:
    """A copy under way, and what is to be done on vLLM's thread when it has ended."""

    future: "Future[None]"
    finish: Callable[[bool], JobResult]


def _namespace(config: OffloadingConfig, block_bytes: int, identity: str | None) -> Namespace:
    sizes = {"tensor": config.parallel.tp_size}
    if config.parallel.dcp_size > 1:
        sizes["decode_context"] = config.parallel.dcp_size
    return Namespace(
        model=config.model.name,
        weights_digest=identity,
        kv_dtype=config.model.dtype,
        tokens_per_block=config.groups[0].tokens_per_block,
        block_size_factor=config.cache.blocks_per_chunk,
        groups=tuple(GroupSpec(layers=group.layer_names, block_bytes=block_bytes) for group in config.groups),
        layout=f"vllm secondary tier, {config.kv_cache_layout}, canonical={config.canonical_layout}",
        parallel=tuple(sizes.items()),
        hash_algorithm="vllm",
    )


def _workers(parallel: OffloadingParallelConfig, rows: memoryview) -> Workers:
    """What vLLM tells a tier of the workers, and whether those that fill *rows* are here."""
    is_alone = parallel.world_size == 1  # and may be in this very process
    return Workers(
        count=parallel.world_size,
        tensor=parallel.tp_size,
        pipeline=parallel.pp_size,
        prefill_context=parallel.pcp_size,
        decode_context=parallel.dcp_size,
        unseen=0 if is_alone else max(0, parallel.world_size - count_neighbours(rows)),
    )


class KvtierTier(SecondaryTierManager):
    """Implements vLLM's secondary tier. All methods are called on the scheduler's thread."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Open the tiers. *options* are kvtier's own and ``kvtier_identity``.

        Raises ``ConfigError`` as ``read_tier_options`` does, ``UnsupportedModelError`` as ``check_workers`` does, and
        what ``open_manager`` raises. Nothing of the engine is left in this process then.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        with leaving_nothing(offloading_spec.config.engine_id):
            self._open(offloading_spec.config, primary_kv_view, options)
        self._has_told_of_weak_hashes = False
        self._has_told_of_adapters = False
        self._view = primary_kv_view
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtier-bridge")
        self._copies: list[_Copy] = []
        self._done: list[JobResult] = []
        self._requests: dict[int, _Request] = {}
        """By the identity of vLLM's context: an id may be used again before its last job is over."""
        self._numbers = count(1)
        self._step = 0
        self._holder = CALLS.watch(self._tiers)
        self._is_closed = False

    def _open(self, config: OffloadingConfig, rows: memoryview, options: Mapping[str, Any]) -> None:
        self._options = read_tier_options(options)
        settings = self._options.load()
        check_workers(config.model.name, _workers(config.parallel, rows))
        if [group.group_id for group in config.groups] != list(range(len(config.groups))):
            raise ConfigError("kvtier can't tell the KV groups apart: some before them are not offloaded")
        namespace = _namespace(config, self.block_size_bytes, self._options.identity)
        self._lasting = lasting_tiers(settings)
        if nothing := why_nothing_lasts(settings, CONFIG_OPTION):
            _log.warning("%s", nothing)
        try:
            self._pool = Pool.create(plan_geometry(settings, namespace))
        except MemoryError as error:
            raise PoolError(str(error)) from None
        try:
            self._tiers = open_manager(
                settings,
                namespace,
                self._pool,
                open_timeout_s=self._options.open_timeout_s,
                as_one_prefix=True,
            )
        except BaseException:
            self._pool.close()
            raise

    # -- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request begins."""
        self._holder.holds_nothing = False
        request_id = f"{req_context.req_id}#{next(self._numbers)}"
        asked = keys_asked(self._tiers, request_id, req_context)
        request = _Request(request_id, asked, self._has_adapter(req_context.req_id))
        self._requests[id(req_context)] = request
        begin_request(self._tiers, request_id, req_context)
        return RequestOffloadingContext()

    def _has_adapter(self, request_id: str) -> bool:
        """Whether its blocks are an adapter's: vLLM's primary tier has them by name and path, whatever was there."""
        if self._holder.adapter_of(request_id) is None:
            return False
        if not self._has_told_of_adapters:
            self._has_told_of_adapters = True
            _log.warning(
                "kvtier keeps no blocks of LoRA adapters behind vLLM's own tiering, which does not notice when an "
                "adapter's files change: use KvtierSpec for them"
            )
        return True

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No submit for this request follows."""
        self._tiers.request_finished(self._requests.pop(id(req_context)).id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT once the block is in kvtier's pool, checked; RETRY while it is on its way there."""
        request = self._requests[id(req_context)]
        if request.has_adapter or self._is_weak(key):
            return LookupResult.MISS
        self._tiers.request_begins(
            request.id
        )  # vLLM asks for requests that have no device blocks, and for them alone
        return _RESULTS[request.asked.answer(key, self._step)]

    def _is_weak(self, key: OffloadKey) -> bool:
        """Whether another run's block could have this key, and a tier give it out: vLLM says so with its first key."""
        if not self._lasting or len(get_offload_block_hash(key)) >= _HASH_BYTES:
            return False
        if not self._has_told_of_weak_hashes:
            self._has_told_of_weak_hashes = True
            _log.error(
                "kvtier stores and loads nothing: vLLM's prefix_caching_hash_algo is not cryptographic, and blocks of "
                "other runs in %s could be taken for this one's; choose one of %s",
                ", ".join(map(repr, self._lasting)),
                ", ".join(CRYPTOGRAPHIC_HASHES),
            )
        return True

    # -- transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy the blocks kvtier does not hold into its pool; from there they go on to the tiers."""
        request = self._requests[id(job_metadata.req_context)]
        if request.has_adapter or any(map(self._is_weak, job_metadata.keys)):
            self._done.append(JobResult(job_id=job_metadata.job_id, success=False))
            return
        chunks = dict(zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True))
        prepared = self._tiers.reserve_store(request.id, list(chunks))
        if prepared is None:
            self._done.append(JobResult(job_id=job_metadata.job_id, success=False))
            return
        if not prepared.keys:
            self._done.append(JobResult(job_id=job_metadata.job_id, success=True))
            return

        def finish(ok: bool) -> JobResult:
            self._tiers.commit_store(prepared.job_id, success=ok)
            return JobResult(job_id=job_metadata.job_id, success=ok)

        pairs = [(chunks[key], row) for key, row in zip(prepared.keys, prepared.rows, strict=True)]
        self._start(self._copy_out, pairs, finish)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Copy the blocks from kvtier's pool; the ones a reset took meanwhile are left out."""
        request = self._requests[id(job_metadata.req_context)]
        keys = list(job_metadata.keys)
        prepared = self._tiers.reserve_load(request.id, keys)
        held = list(prepared.keys)
        if not held:
            self._done.append(JobResult(job_id=job_metadata.job_id, success=False, successful_keys=()))
            return

        def finish(ok: bool) -> JobResult:
            self._tiers.commit_load(prepared.job_id)
            is_whole = ok and len(held) == len(keys)
            return JobResult(job_id=job_metadata.job_id, success=is_whole, successful_keys=held if ok else ())

        chunks = job_metadata.chunk_ids.tolist()[: len(held)]
        self._start(self._copy_in, list(zip(chunks, prepared.rows, strict=True)), finish)

    def _start(
        self,
        copy: Callable[[Sequence[tuple[int, int]]], None],
        pairs: Sequence[tuple[int, int]],
        finish: Callable[[bool], JobResult],
    ) -> None:
        self._copies.append(_Copy(self._copier.submit(copy, pairs), finish))

    def _copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        for chunk, row in pairs:
            self._pool.row(row)[: self.block_size_bytes] = self._bytes(chunk)

    def _copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        for chunk, row in pairs:
            self._bytes(chunk)[:] = self._pool.row(row)[: self.block_size_bytes]

    def _bytes(self, chunk: int) -> memoryview:
        begin = chunk * self.block_size_bytes
        return self._view.cast("B")[begin : begin + self.block_size_bytes]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended since the last call. Never waits."""
        ended = [copy for copy in self._copies if copy.future.done()]
        self._copies = [copy for copy in self._copies if not copy.future.done()]
        for copy in ended:
            error = copy.future.exception()
            if error is not None:
                _log.error("a copy between vLLM's primary tier and kvtier's pool failed: %s", error)
            self._done.append(copy.finish(error is None))
        done, self._done = self._done, []
        return done

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Promotions into kvtier's pool leave."""
        self._tiers.end_step()
        self._step += 1

    # -- reset and end

    def drain_jobs(self) -> None:
        """Wait for the copies, which touch vLLM's memory, and begin a new epoch: vLLM drains only to reset."""
        wait([copy.future for copy in self._copies])
        self._done = list(self.get_finished_jobs())
        self._tiers.reset_cache()
        self._step += 1

    def shutdown(self) -> None:
        """Shut the tiers down. Twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        CALLS.unwatch(self._holder)
        self._copier.shutdown(wait=True)
        if self._tiers.shutdown(self._options.shutdown_timeout_s):
            self._pool.close()
