"""``KvtierLinker``: what SGLang makes in each scheduler's process, and asks about the pages that its device lacks.

Translates between SGLang's calls and ``PageCache``. A load is over when ``load`` answers: SGLang aborts requests whose
load fails later, and computes those whose load was refused.

With tensor parallelism each rank has a scheduler, a linker and a part of every page. SGLang keeps its trees the same in
all ranks: they ask the same in the same order, and have to get the same answers.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvtier_core import PluginError
from kvtier_core.engine import open_parts, why_nothing_lasts
from kvtier_sglang.cache import CopyStuckError, NamedBlocks, PageCache
from kvtier_sglang.canary import check_blocks
from kvtier_sglang.changes import CHANGES
from kvtier_sglang.facts import check_engine, make_namespace
from kvtier_sglang.figures import FIGURES
from kvtier_sglang.inspection import find_ranks, read_facts
from kvtier_sglang.memory import describe_parts, find_parts, find_side_states, make_layout
from kvtier_sglang.options import load_options

_CLOSE_TIMEOUT_S = 10.0
_NO_BATCH = -1
"""SGLang's number for a batch that loads nothing: ours have loaded before they begin."""
_log = logging.getLogger("kvtier.sglang")


class _NothingToWaitFor:
    """SGLang's attention asks before it reads a layer. All pages are there."""

    def set_consumer(self, index: int) -> None:
        """A batch begins."""

    def wait_until(self, layer: int) -> None:
        """A layer is about to be read."""


class KvtierLinker(UnifiedCacheLinker):
    """SGLang's external cache on kvtier's pool and tiers. All calls come on the scheduler's thread.

    Options as in ``options``. Raises what the parts raise (``ConfigError``, ``PluginError``, ``PoolError``,
    ``TierOpenError``, ``UnsupportedModelError``) before SGLang serves its first request.
    """

    def __init__(
        self,
        server_args: Any,
        params: CacheInitParams,
        *,
        components: set[ComponentType],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        if not CHANGES.is_watched:
            raise PluginError(
                "SGLang did not load the plugin 'kvtier', by which kvtier is told of new weights: add it to "
                "SGLANG_PLUGINS, and install kvtier-sglang where SGLang runs"
            )
        settings = load_options(extra_config or {})
        parts = find_parts(params, map(str, components))
        layout = make_layout(parts)
        self._ranks = find_ranks(params)
        facts = read_facts(
            server_args,
            params.token_to_kv_pool_allocator.get_kvcache(),
            pools=[part.pool for part in parts],
            layout=layout,
            kv_parts=describe_parts(parts),
            ranks=self._ranks,
            has_request_windows=not params.swa_gates_prefix_match or params.decoder_swa_bounded_replay,
            side_states=find_side_states(params.req_to_token_pool),
        )
        check_engine(facts)
        namespace = make_namespace(facts)
        self._parts = {part.name: (group, part) for group, part in enumerate(parts)}
        self._changes_seen = CHANGES.count
        self._cache = PageCache(open_parts(settings, namespace, layout), params.page_size)
        with ExitStack() as on_failure:
            on_failure.callback(self._cache.close, _CLOSE_TIMEOUT_S)
            check_blocks(self._cache, parts)
            on_failure.pop_all()
        self.forward_stream = forward_stream
        self.layer_done_counter = _NothingToWaitFor()
        self.pools = {PoolName(part.name): part.pool for part in parts}
        FIGURES.read = self._cache.figures
        if nothing := why_nothing_lasts(settings, "linker_extra_config's kvtier_config"):
            _log.warning("%s", nothing)
        _log.info(
            "kvtier serves namespace %s with tiers %s", namespace.name, ", ".join(settings.enabled_tiers)
        )

    @property
    def _is_right(self) -> bool:
        """Whether the engine's cache is of the weights that kvtier's pages are of."""
        return self._changes_seen == CHANGES.count

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every number of leading pages that can be loaded, with the windows and the state that end there."""
        if not self._is_right:
            return []
        pages = transfers[0]
        assert pages.name is PoolName.KV, pages.name
        return list(self._cache.lookup(rid, pages.keys or []))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Load the pages into the slots of the request, or refuse. The other ranks hear of it whatever happens here."""
        has_loaded = False
        try:
            has_loaded = self._is_right and self._cache.load(rid, self._blocks(transfers))
        except CopyStuckError:
            self._in_all_ranks(False)
            raise
        except Exception:  # noqa: BLE001 - a mistake of ours, and the prompt can be computed
            _log.exception("request %s: computed, by a fault of kvtier's: report it", rid)
        return self._in_all_ranks(has_loaded)

    def cancel_queued_load(self, rid: str) -> bool:  # noqa: ARG002 - the interface's
        """No load is queued, and the slots may be given to others."""
        return True

    def start_layer_wise_loading(self) -> int:
        """There is nothing to start."""
        return _NO_BATCH

    def finish_layer_wise_loading(self, counter_index: int) -> bool:  # noqa: ARG002 - the interface's
        """All loads went well."""
        return True

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:  # noqa: ARG002 - the interface's
        """Take pages from the device. SGLang keeps them there until they are acknowledged."""
        if not self._is_right:
            return False
        self._cache.store(self._blocks(transfers))
        return True

    def num_completed_offloads(self) -> int:
        """How many offloads can be acknowledged. SGLang asks once a step."""
        return self._cache.poll()

    def pop_completed_offload(self) -> bool:
        """Whether the pool has the pages of the oldest one."""
        return self._cache.pop_stored()

    def reset(self) -> None:
        """SGLang has flushed its cache. After new weights no tier's pages answer any more, whatever ``on_reset`` is."""
        changes = CHANGES.count
        self._cache.reset(everywhere=not self._is_right)
        self._changes_seen = changes

    def close(self) -> None:
        """Let the tiers finish and shut them down."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        self._cache.flush(_CLOSE_TIMEOUT_S / 2)
        if not self._cache.close(deadline - time.monotonic()):
            _log.warning("a tier did not shut down in %g s: the pool stays mapped", _CLOSE_TIMEOUT_S)

    def _in_all_ranks(self, is_so: bool) -> bool:  # noqa: FBT001 - the one thing that is asked
        """Whether it is so in every rank. Waits for the others."""
        if self._ranks.size == 1:
            return is_so
        answer = torch.tensor([int(is_so)])
        torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MIN, group=self._ranks.group)
        return bool(answer.item())

    def _blocks(self, transfers: Sequence[PoolTransfer]) -> Sequence[NamedBlocks]:
        """Those of *transfers*, the pages of full attention first, as SGLang's tree has them."""
        blocks = []
        for transfer in transfers:
            assert transfer.device_indices is not None, "a transfer without slots"
            group, part = self._parts[transfer.name]
            blocks.append(NamedBlocks(transfer.keys or [], part.blocks_of(transfer.device_indices), group))
        return blocks
