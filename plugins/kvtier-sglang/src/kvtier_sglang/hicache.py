"""``KvtierHiCache``: what SGLang's HiCache stores its host memory's pages in, with the backend ``dynamic``.

Translates between SGLang's calls and ``HostPages``. HiCache copies between device and host memory, and kvtier between
host memory and its pool. So it never touches a device.

With tensor parallelism each rank has a storage of its own, with its part of every page. SGLang takes the least that all
ranks have.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, PoolName
from sglang.srt.runtime_context import get_server_args

from kvtier_core import ConfigError, PluginError, UnsupportedModelError
from kvtier_core.engine import GroupSpec, open_parts, why_nothing_lasts
from kvtier_core.transfer import KVLayout
from kvtier_sglang.cache import PageCache
from kvtier_sglang.canary import check_host_pages
from kvtier_sglang.changes import CHANGES
from kvtier_sglang.facts import check_engine, make_namespace
from kvtier_sglang.figures import FIGURES
from kvtier_sglang.hostpages import HostPages
from kvtier_sglang.inspection import Ranks, read_facts
from kvtier_sglang.options import load_options
from kvtier_sglang.pages import page_layout

_CLOSE_TIMEOUT_S = 10.0
_COPY_TIMEOUT_S = float("inf")
"""SGLang gives host memory to others as soon as it has an answer."""
_OPTION = "hicache_storage_backend_extra_config"
_SGLANGS = frozenset({"allocator", "backend_name", "class_name", "interface_v1", "module_path"})
"""What SGLang itself reads of that option, beside what it takes out."""
_log = logging.getLogger("kvtier.sglang")


class KvtierHiCache(HiCacheStorage):
    """HiCache's storage on kvtier's pool and tiers. Nothing is raised once it is open.

    Options as in ``options``. Before SGLang serves a request, ``on_host_pools_registered`` raises what the parts
    raise (``ConfigError``, ``PluginError``, ``PoolError``, ``TierOpenError``, ``UnsupportedModelError``).
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002 - SGLang's
        extra_config = storage_config.extra_config or {}
        if not extra_config.get("interface_v1"):
            raise ConfigError(
                f"{_OPTION} must say 'interface_v1': 1, or SGLang copies each page once more on its way to kvtier"
            )
        if not CHANGES.is_watched:
            raise PluginError(
                "SGLang did not load the plugin 'kvtier', by which kvtier is told of new weights: add it to "
                "SGLANG_PLUGINS, and install kvtier-sglang where SGLang runs"
            )
        if CHANGES.count:
            raise PluginError(
                "SGLang's weights may have changed since it started, and kvtier can't tell which it has now: start "
                "SGLang again"
            )
        ours = {name: value for name, value in extra_config.items() if name not in _SGLANGS}
        self._settings = load_options(ours, _OPTION)
        self._ranks = Ranks(group=None, rank=storage_config.tp_rank, size=storage_config.tp_size)
        self._pages: HostPages | None = None
        self.registered_pools: dict[str, Any] = {}

    def on_host_pools_registered(self) -> None:
        """Open the tiers for the host memory that SGLang has named."""
        host_pool = self.mem_pool_host
        layout = page_layout_of(host_pool)
        full = GroupSpec(
            layers=(f"{host_pool.layer_num} of full attention",), block_bytes=layout.payload_bytes[0]
        )
        facts = read_facts(
            get_server_args(),
            host_pool,
            pools=[*(self.registered_pools or {PoolName.KV: host_pool}).values()],
            layout=layout,
            kv_parts=[full],
            ranks=self._ranks,
        )
        check_engine(facts)
        namespace = make_namespace(facts)
        parts = open_parts(self._settings, namespace, layout)
        cache = PageCache(parts, host_pool.page_size, copy_timeout_s=_COPY_TIMEOUT_S)
        with ExitStack() as on_failure:
            on_failure.callback(cache.close, _CLOSE_TIMEOUT_S)
            check_host_pages(cache, host_pool)
            on_failure.pop_all()
        self._pages = HostPages(cache, host_pool.page_size, lambda: CHANGES.count == 0)
        FIGURES.read = self._pages.figures
        if nothing := why_nothing_lasts(self._settings, f"{_OPTION}'s kvtier_config"):
            _log.warning("%s", nothing)
        tiers = ", ".join(self._settings.enabled_tiers)
        _log.info("kvtier serves HiCache's namespace %s with tiers %s", namespace.name, tiers)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002 - SGLang's
        """How many of the leading pages can be loaded."""
        return self._open_pages.count(keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ARG002 - SGLang's
        """Load pages into host memory. Which of them are there: the leading ones."""
        return _leading(self._open_pages.load(keys, host_indices), keys)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ARG002 - SGLang's
        """Take pages from host memory. Which of them kvtier has: the leading ones."""
        return _leading(self._open_pages.store(keys, host_indices), keys)

    def clear(self) -> bool:
        """No page answers any more, in no tier."""
        return self._open_pages.clear()

    def close(self) -> None:
        """Let the tiers finish and shut them down. SGLang calls it when it detaches the storage."""
        if self._pages is None:
            return
        FIGURES.read = None
        if not self._pages.close(_CLOSE_TIMEOUT_S):
            _log.warning("a tier did not shut down in %g s: the pool stays mapped", _CLOSE_TIMEOUT_S)

    @property
    def _open_pages(self) -> HostPages:
        assert self._pages is not None, "on_host_pools_registered comes first"
        return self._pages

    # -- the way that copies, which SGLang does not take with interface_v1

    def exists(self, key: str) -> bool:
        """Whether a page can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing is given out by this way."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> int:  # noqa: ARG002 - SGLang's
        """Nothing is given out by this way."""
        return 0

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002 - SGLang's
        """Nothing is taken by this way."""
        return False

    def batch_set(
        self,
        keys: list[str],  # noqa: ARG002 - SGLang's
        values: Any = None,  # noqa: ARG002 - SGLang's
        target_locations: Any = None,  # noqa: ARG002 - SGLang's
        target_sizes: Any = None,  # noqa: ARG002 - SGLang's
    ) -> bool:
        """Nothing is taken by this way."""
        return False


def _leading(count: int, keys: Sequence[str]) -> list[bool]:
    return [index < count for index in range(len(keys))]


def page_layout_of(host_pool: Any) -> KVLayout:
    """The pages of HiCache's host memory, whose buffer is K and then V."""
    tokens = host_pool.page_size
    match type(host_pool).__name__, host_pool.layout:
        case "MHATokenToKVPoolHost", "layer_first":  # (2, layers, slots, heads, dim)
            keys, values = host_pool.kv_buffer
            return page_layout([*keys, *values], tokens)
        case "MHATokenToKVPoolHost", "page_first":  # (2, slots, layers, heads, dim)
            return page_layout([*host_pool.kv_buffer], tokens)
        case "MHATokenToKVPoolHost", ("page_first_direct" | "page_head"):  # (2, pages, ...)
            return page_layout([*host_pool.kv_buffer], 1)
    raise UnsupportedModelError(
        f"kvtier can't serve this model in HiCache: its host memory is a {type(host_pool).__name__} with layout "
        f"{host_pool.layout!r}, and kvtier knows layer_first, page_first, page_first_direct and page_head of full "
        "attention"
    )
