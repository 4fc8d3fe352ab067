"""``KvtierSpec``: what vLLM's ``OffloadingConnector`` makes once in the scheduler's process and once in each worker.

Puts the parts together; decides which of the machine's devices can be served. In a worker it makes or joins the pool,
in the scheduler it opens the tiers.
"""

import logging
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier_core import PoolError, UnsupportedModelError
from kvtier_core.engine import lasting_tiers, open_manager, plan_geometry, why_nothing_lasts
from kvtier_core.transfer import SelfTestError, cpus_near, has_device, open_device, self_test
from kvtier_vllm.canary import WorkerAsDevice
from kvtier_vllm.facts import make_namespace
from kvtier_vllm.failed_start import leaving_nothing
from kvtier_vllm.inspection import read_facts, read_weights_digest
from kvtier_vllm.manager import KvtierManager
from kvtier_vllm.options import CONFIG_OPTION, read_options
from kvtier_vllm.parts import Part
from kvtier_vllm.places import places_of
from kvtier_vllm.refusals import check_engine, check_persistence, check_reset
from kvtier_vllm.sharing import open_as_scheduler, open_as_worker
from kvtier_vllm.stats import metric_definitions
from kvtier_vllm.worker import KvtierWorker, copy_batch

_log = logging.getLogger("kvtier.vllm")


class KvtierSpec(OffloadingSpec):
    """vLLM's offloading on kvtier's pool and tiers.

    Options as in ``options``. Every method raises what the parts raise (``ConfigError``, ``PluginError``,
    ``PoolError``, ``TierOpenError``, ``UnsupportedModelError``) before vLLM serves its first request.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """What ``/metrics`` will show. Raises ``ConfigError`` for options that are not known."""
        read_options(extra_config)
        return metric_definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._options = read_options(config.extra_config)
        self._has_worker = False

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this process; worker 0 makes the pool. Nothing of it is left when it raises."""
        engine_id = self.config.engine_id
        if self._has_worker:
            raise PoolError(
                f"this process has the connector of the engine {engine_id!r} already, and vLLM keeps one a process: "
                "start each engine in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1); after a start that vLLM "
                "itself gave up, call vllm.distributed.kv_transfer.ensure_kv_transfer_shutdown() first"
            )
        with leaving_nothing(engine_id):
            worker = self._make_worker(kv_caches)
        self._has_worker = True
        return worker

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        facts = read_facts(self.config, kv_caches)
        check_engine(facts)
        device_type = _check_device(kv_caches)
        digest = read_weights_digest(edges=self._options.trusts_edges)
        facts = replace(facts, weights_digest=digest, identity=self._options.identity)
        settings = self._options.load()
        geometry = plan_geometry(settings, make_namespace(facts))
        rank = self.config.parallel.rank
        with ExitStack() as on_failure:
            pool = open_as_worker(
                self.config.engine_id,
                rank,
                replace(geometry, num_workers=facts.workers.count),
                facts,
                self._options.open_timeout_s,
                huge_pages=settings.pool.huge_pages,
            )
            on_failure.callback(pool.close)
            part = Part(facts.groups, facts.blocks_per_chunk, rank, is_canonical=facts.canonical_layout)
            layout = part.make_layout(kv_caches)
            if settings.pool.prefault:
                pool.prefault(cpus_near(layout.device))
            batch = copy_batch if device_type == "cuda" else None
            device = open_device(layout, pool, worker=rank, copy_batch=batch)
            on_failure.callback(device.shutdown, self._options.shutdown_timeout_s)
            tested = WorkerAsDevice(device, pool, facts.groups, facts.blocks_per_chunk, rank)
            try:
                report = self_test(tested, layout, pool, rank)
            except SelfTestError as error:
                raise UnsupportedModelError(f"kvtier-vllm can't serve this engine: {error}") from None
            on_failure.pop_all()
        _log.log(
            logging.INFO if device_type == "cpu" else logging.WARNING,
            "worker %d on %s passed kvtier's self-test%s: %s",
            rank,
            layout.device,
            "" if device_type == "cpu" else " (kvtier's authors have no GPU: please report how it goes)",
            report.describe(),
        )
        return KvtierWorker(device, pool, part, self._options.shutdown_timeout_s, device_type)

    def get_manager(self) -> OffloadingManager:
        """The manager; the tiers are open when it returns. Nothing of the engine is left here when it raises."""
        with leaving_nothing(self.config.engine_id):
            return self._make_manager()

    def _make_manager(self) -> OffloadingManager:
        settings = self._options.load()
        places = places_of(settings)
        pool, facts = open_as_scheduler(
            self.config.engine_id, self._options.open_timeout_s, huge_pages=settings.pool.huge_pages
        )
        try:
            check_persistence(facts, lasting_tiers(settings))
            check_reset(facts, keeps_tiers=settings.on_reset == "pool")
            namespace = make_namespace(facts)
            tiers = open_manager(settings, namespace, pool, open_timeout_s=self._options.open_timeout_s)
        except BaseException:
            pool.close()
            raise
        if nothing := why_nothing_lasts(settings, CONFIG_OPTION):
            _log.warning("%s", nothing)
        _log.info(
            "kvtier serves namespace %s with tiers %s", namespace.name, ", ".join(settings.enabled_tiers)
        )
        return KvtierManager(
            tiers,
            pool,
            places,
            self._options.shutdown_timeout_s,
            tokens_per_hash=self.config.cache.tokens_per_hash,
            has_lora=facts.has_lora,
            tells_events=self.kv_events_config.enable_kv_cache_events,
        )


def _check_device(kv_caches: CanonicalKVCaches) -> str:
    """The type of the device that the KV is on; CUDA's is that of ROCm as well."""
    device = kv_caches.tensors[0].tensor.device
    if not has_device(device):
        raise UnsupportedModelError(
            f"kvtier-vllm can't serve KV on {device}: it copies from CPUs and from accelerators that have streams in "
            "torch. Run this engine without kvtier"
        )
    device_type: str = device.type
    return device_type
