"""A real SGLang with HiCache answers from what kvtier's tiers kept as from its own cache.

HiCache needs a GPU: ``hicache_on_cpu`` stands in for the pinning of its memory and for its kernels. Engines take
a while to start, so each is asked many things.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier_core import ConfigError, PluginError, UnsupportedModelError
from kvtier_core.settings import PoolSettings, Settings
from kvtier_sglang.canary import check_host_pages
from tests.plugins.distributions import Site
from tests.sglang.asking import BLOCKS, LONG, WHOLE, restore, store
from tests.sglang.engines import PAGE, Engine, hicache, needs_sglang, prompt, save_model
from tests.sglang.paged import PATIENCE_S, TOKENS, open_cache

pytestmark = [needs_sglang, pytest.mark.timeout(1500)]
RANKS = 2
imports_sglang = pytest.mark.filterwarnings("ignore")  # it warns of what it imports itself


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory; SGLang's processes have HiCache's stand-ins and a tier type ``controlled``."""
    directory = tmp_path_factory.mktemp("hicache")
    (directory / "site").mkdir()
    groups = {
        "kvtier.tiers.v1": {"controlled": "tests.sglang.controlled:ControlledTier"},
        "sglang.srt.plugins": {"hicache-on-cpu": "tests.sglang.hicache_on_cpu:register"},
    }
    Site(directory / "site").install("kvtier-for-hicache", groups, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory / "site"))
        yield directory


def _config(root: Path) -> Path:
    root.mkdir()
    file = root.with_suffix(".toml")
    file.write_text(f'[pool]\ncapacity = "16MiB"\n[tiers.kept]\ntype = "controlled"\nroot = "{root}"\n')
    return file


def _hits(engine: Engine) -> dict[str, int]:
    return dict(engine.figures()["hit_blocks"])


def test_pages_are_restored_and_a_bad_tier_or_new_weights_cost_hits_alone(model, place):
    root = place / "blocks"
    arguments = hicache(_config(root))
    engine = Engine(model, place / "first.log", **arguments)
    try:
        first = {name: store(engine, root, name) for name in ("a", "b", "c", "d", "e", "f")}
        assert restore(engine, "a").tokens == first["a"].tokens
        engine.clear_storage()
        engine.flush()
        assert engine.ask(prompt("a", LONG))[0].cached == 0
        for name in ("b", "c", "d", "e", "f"):
            engine.flush()
            store(engine, root, name)
    finally:
        engine.close()
    engine = Engine(model, place / "second.log", **arguments)
    try:
        before = _hits(engine)
        [again] = engine.ask(prompt("b", LONG))
        assert (again.tokens, again.cached) == (first["b"].tokens, WHOLE)
        assert _hits(engine).get("kept", 0) - before.get("kept", 0) == WHOLE // PAGE
        for name, fault in (("c", "flip"), ("d", "fail"), ("e", "hang")):
            (root / fault).touch()
            [answer] = engine.ask(prompt(name, LONG))
            (root / fault).unlink()
            assert (answer.tokens, answer.cached) == (first[name].tokens, 0), fault
        assert restore(engine, "f").tokens == first["f"].tokens
        engine.update_weights(save_model(place / "other", seed=1))
        [changed] = engine.ask(prompt("f", LONG))
        assert changed.cached == 0
        assert changed.tokens != first["f"].tokens
        engine.flush()
        assert engine.ask(prompt("f", LONG))[0].cached == 0
    finally:
        engine.close()
    assert "fault of kvtier's" not in engine.log()


def test_two_ranks_restore_whole_pages_of_each_and_no_more_than_both_have(model, place, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    root = place / "ranks"
    arguments = hicache(_config(root), "page_first_direct")
    engine = Engine(model, place / "ranks.log", tp_size=RANKS, **arguments)
    try:
        first = {name: store(engine, root, name, files=RANKS * BLOCKS) for name in ("a", "b")}
        assert restore(engine, "a").tokens == first["a"].tokens
    finally:
        engine.close()
    one, _ = sorted(directory for directory in root.iterdir() if directory.is_dir())
    for file in one.iterdir():  # a bit of every page of one rank
        data = bytearray(file.read_bytes())
        data[1000] ^= 1
        file.write_bytes(data)
    engine = Engine(model, place / "damaged.log", tp_size=RANKS, **arguments)
    try:
        [answer] = engine.ask(prompt("b", LONG))
        assert (answer.tokens, answer.cached) == (first["b"].tokens, 0)
    finally:
        engine.close()


def _host_pool(layout: str):
    """SGLang's own host memory, without pinning."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    slots, heads, dim = 64, 2, 8
    keys, values = (tuple(torch.zeros(slots, heads, dim) for _ in range(3)) for _ in range(2))
    pointers = [torch.tensor([buffer.data_ptr() for buffer in each]) for each in (keys, values)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=keys, v=values, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
        ),
        page_size=TOKENS,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    capacity = {"device_capacity_tokens": slots, "start_layer": 0, "end_layer": 2}
    with host_memory_budget_scope(1 << 20):  # or it would leave 10 GiB of the machine to others
        return MHATokenToKVPoolHost(info, 2.0, 0, TOKENS, layout, pin_memory=False, **capacity)


@imports_sglang
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_c05_each_layout_of_sglangs_host_memory_is_read_as_sglang_reads_it(layout):
    from kvtier_sglang.hicache import page_layout_of

    host_pool = _host_pool(layout)
    cache = open_cache(
        Settings(pool=PoolSettings(capacity=1 << 20), tiers={}, tier_types={}), page_layout_of(host_pool)
    )
    free = host_pool.available_size()
    check_host_pages(cache, host_pool)
    assert host_pool.available_size() == free
    taken = host_pool.alloc(free)
    with pytest.raises(UnsupportedModelError, match="hicache_ratio"):
        check_host_pages(cache, host_pool)
    host_pool.free(taken)
    host_pool.kv_buffer = host_pool.kv_buffer.clone()  # kvtier copies the old memory
    with pytest.raises(UnsupportedModelError, match="not what SGLang had written"):
        check_host_pages(cache, host_pool)
    cache.close(PATIENCE_S)


@imports_sglang
def test_other_host_memory_is_refused_by_name():
    from kvtier_sglang.hicache import page_layout_of

    host_pool = _host_pool("page_head")
    host_pool.layout = "page_unified"
    with pytest.raises(UnsupportedModelError, match="'page_unified'"):
        page_layout_of(host_pool)
    with pytest.raises(UnsupportedModelError, match="a SimpleNamespace with layout 'layer_first'"):
        page_layout_of(SimpleNamespace(layout="layer_first", page_size=4))


def _storage_config(**extra):
    return SimpleNamespace(extra_config=extra, tp_rank=0, tp_size=1)


@imports_sglang
def test_a_storage_is_refused_where_it_can_not_work(monkeypatch):
    from kvtier_sglang import KvtierHiCache
    from kvtier_sglang.changes import CHANGES

    with pytest.raises(ConfigError, match="interface_v1"):
        KvtierHiCache(_storage_config())
    with pytest.raises(PluginError, match="SGLANG_PLUGINS"):
        KvtierHiCache(_storage_config(interface_v1=1))
    monkeypatch.setattr(CHANGES, "is_watched", True)
    with pytest.raises(
        ConfigError, match="hicache_storage_backend_extra_config: kvtier knows no 'kvtier_confg'"
    ):
        KvtierHiCache(_storage_config(interface_v1=1, backend_name="kvtier", kvtier_confg="x"))
    monkeypatch.setattr(CHANGES, "count", 1)
    with pytest.raises(PluginError, match="weights may have changed"):
        KvtierHiCache(_storage_config(interface_v1=1))
