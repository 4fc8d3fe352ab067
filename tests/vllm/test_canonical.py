"""Rows that do not depend on the tensor-parallel size: by vLLM's own mappings, and in real engines of two sizes."""

import time
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier_core.transfer import (
    CPUDevice,
    Direction,
    GroupTransfer,
    KVGroup,
    KVLayout,
    Pool,
    PoolGeometry,
    SelfTestError,
    self_test,
)
from kvtier_vllm.facts import Workers, make_namespace
from tests.vllm.architectures import save_latent
from tests.vllm.engines import connector, disk, needs_vllm, prompt
from tests.vllm.facts_of import GROUP, PLAIN

pytestmark = [needs_vllm, pytest.mark.timeout(2400)]
PATIENCE_S = 120.0
LAYERS, BLOCKS, TOKENS, HEADS, SIZE = 2, 4, 8, 4, 16
ROOM_BYTES = 4096
"""Of a row: for the proof, and what makes it whole pages."""
HEAD_BYTES = TOKENS * 2 * SIZE * 4
NAMES = [f"layers.{number}" for number in range(LAYERS)]


def everything(kind="HND"):
    """The KV of all workers: K and V of each head, or the latent."""
    import torch

    page = (TOKENS, SIZE) if kind == "latent" else (HEADS, TOKENS, 2 * SIZE)
    return torch.randn(LAYERS, BLOCKS, *page)


def spec_of(kind, heads):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    cls = MLAAttentionSpec if kind == "latent" else FullAttentionSpec
    return cls(block_size=TOKENS, num_kv_heads=heads, head_size=SIZE, dtype=torch.float32)


def caches(kv, tensor, rank, kind="HND", heads=HEADS):
    """What vLLM hands to the worker *rank* of an engine with *tensor* workers, with its part of *kv*."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of a module that vLLM imports
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    own = 1 if kind == "latent" else max(1, heads // tensor)
    first = rank * own % heads
    spec = spec_of(kind, own)
    layers = {}
    for name, page in zip(NAMES, kv, strict=True):
        if kind == "latent":
            layers[name] = page.clone()
        elif kind == "NHD":
            layers[name] = page[:, first : first + own].transpose(1, 2).contiguous().transpose(1, 2)
        else:
            layers[name] = page[:, first : first + own].contiguous()
    parallel = SimpleNamespace(
        tensor_parallel_size=tensor,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
        world_size=tensor,
        rank=rank,
    )
    config: Any = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads)
    )
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=NAMES)]
    described: Any = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups)
    mappings = canonical_mapping.derive_canonical_mappings(config, described, layers)
    size = spec.real_page_size_bytes
    tensors = [
        CanonicalKVCacheTensor(
            torch.as_strided(page, (BLOCKS, size // 4), (size // 4, 1)).view(torch.int8), size
        )
        for page in layers.values()
    ]
    refs = [CanonicalKVCacheRef(number, size, mappings[name]) for number, name in enumerate(NAMES)]
    return CanonicalKVCaches(tensors, [refs])


def part_of(described, tensor, rank, kind="HND", factor=1):
    from kvtier_vllm.parts import Part

    size = sum(ref.page_size_bytes for ref in described.group_data_refs[0])
    group = replace(GROUP, parts=(size,) * tensor, copies=tensor if kind == "latent" else 1)
    return Part([group], factor, rank, is_canonical=True)


def new_pool(tensor):
    row_bytes = 2 * LAYERS * HEADS * HEAD_BYTES + 4096
    return Pool.create(PoolGeometry(num_rows=4, row_bytes=row_bytes, num_workers=tensor))


def copy(direction, pool, each, kind="HND", factor=1):
    """Blocks 1 to 3 of every worker to or from rows, which have *factor* slots: all of 1 to 3, or three of 1 and 2."""
    given = GroupTransfer(
        block_ids=[1, 2, 3], rows=[1, 2, 3] if factor == 1 else [1, 2], first_slot=factor - 1
    )
    for rank, described in enumerate(each):
        part = part_of(described, len(each), rank, kind, factor)
        device = CPUDevice(part.make_layout(described), pool, rank)
        device.submit(direction, 1, part.choose(direction, [given]))
        assert device.wait(direction, [1], 60.0)
        assert device.shutdown(60.0)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("kind", ["HND", "NHD", "latent"])
def test_v11_rows_are_the_same_bytes_whichever_number_of_workers_wrote_them(kind, factor):
    import torch

    kv = everything(kind)
    rows = {}
    for tensor in (1, 2, 4):
        with new_pool(tensor) as pool:
            copy(
                Direction.STORE,
                pool,
                [caches(kv, tensor, rank, kind) for rank in range(tensor)],
                kind,
                factor,
            )
            rows[tensor] = [bytes(pool.row(row)) for row in range(4)]
    assert any(rows[1][2])
    assert rows[1] == rows[2] == rows[4]
    for tensor in (1, 2, 4):
        nothing = [caches(torch.zeros_like(kv), tensor, rank, kind) for rank in range(tensor)]
        with new_pool(tensor) as pool:
            for number, row in enumerate(rows[1]):
                pool.row(number)[:] = row
            copy(Direction.LOAD, pool, nothing, kind, factor)
        for rank, described in enumerate(nothing):
            expected = caches(kv, tensor, rank, kind)
            for found, right in zip(described.tensors, expected.tensors, strict=True):
                assert torch.equal(found.tensor[1:], right.tensor[1:])
                assert not found.tensor[0].any()


def test_v11_two_heads_exchanged_are_seen_in_the_rows():
    kv = everything()
    rows = []
    for order in ([0, 1, 2, 3], [0, 2, 1, 3]):
        with new_pool(2) as pool:
            copy(Direction.STORE, pool, [caches(kv[:, :, order], 2, rank) for rank in (0, 1)])
            rows.append(bytes(pool.row(1)))
    assert rows[0] != rows[1]


@pytest.mark.parametrize("is_bad", [False, True])
def test_v11_the_self_test_sees_a_device_that_exchanges_two_heads_both_ways(is_bad):
    described = caches(everything(), 2, 1)
    layout = part_of(described, 2, 1).make_layout(described)
    (group,) = layout.groups
    heads = [
        (tensor[:, at : at + HEAD_BYTES], place + at)
        for tensor, place in zip(group.tensors, group.page_offsets, strict=True)
        for at in range(0, tensor.shape[1], HEAD_BYTES)
    ]
    places = [place for _, place in heads]
    if is_bad:
        places[0], places[1] = places[1], places[0]
    tensors = [tensor for tensor, _ in heads]
    by_heads = KVGroup(tensors, page_offsets=places, slot_bytes=group.slot_bytes)
    with new_pool(2) as pool:
        device = CPUDevice(KVLayout(by_heads, row_offsets=[0]), pool, 1)
        if is_bad:
            with pytest.raises(SelfTestError, match=r"of block \d's page in tensor 0 of KV group 0"):
                self_test(device, layout, pool, 1)
        else:
            self_test(device, layout, pool, 1)
        assert device.shutdown(60.0)


def test_v11_a_layer_that_vllm_does_not_certify_is_found():
    from kvtier_vllm.canonical import find_uncertain

    (refs,) = caches(everything(), 2, 1).group_data_refs
    assert find_uncertain(refs, NAMES, copies=1, rank=1) is None
    assert find_uncertain(refs, NAMES, copies=2, rank=1) == "layers.0"
    second = refs[1].mapping
    assert second is not None
    gap = replace(second, runs=(replace(second.runs[0], local_offset=4), *second.runs[1:]))
    for worse in (None, replace(second, parallelism_agnostic=False), gap):
        assert find_uncertain([refs[0], replace(refs[1], mapping=worse)], NAMES, 1, 1) == "layers.1"
    assert find_uncertain(refs[:1], NAMES, 1, 1) == "layers.0"
    assert find_uncertain(refs[:1], [], 1, 1) is None  # a stage that has no layer of these


def test_v11_kv_heads_that_several_workers_hold_are_uncertain():
    from kvtier_vllm.canonical import find_uncertain

    (refs,) = caches(everything(), 4, 1, heads=2).group_data_refs
    assert find_uncertain(refs, NAMES, copies=1, rank=1) == "layers.0"


@pytest.mark.parametrize(
    ("each", "copies", "fills"),
    [
        ([[(0, 8)], [(8, 8)]], 1, True),
        ([[(0, 4), (8, 4)], [(4, 4), (12, 4)]], 1, True),
        ([[(0, 8)], [(0, 8)]], 1, False),
        ([[(0, 8)], [(9, 7)]], 1, False),
        ([[(0, 8)], [(8, 9)]], 1, False),
        ([[(0, 16)], [(0, 16)]], 2, True),
        ([[(0, 16)], [(0, 8)]], 2, False),
    ],
)
def test_v11_workers_must_fill_a_slot_exactly(each, copies, fills):
    from kvtier_vllm.canonical import fill_a_slot

    assert fill_a_slot(each, copies, 16) is fills


def test_v11_the_namespace_of_the_canonical_layout_does_not_depend_on_tensor_parallelism():
    one = replace(PLAIN, canonical_layout=True)
    workers = Workers(count=2, tensor=2)
    two = replace(one, workers=workers, groups=(replace(GROUP, parts=(4096, 4096)),))
    latent = replace(one, workers=workers, groups=(replace(GROUP, parts=(8192, 8192), copies=2),))
    assert make_namespace(one).name == make_namespace(two).name == make_namespace(latent).name
    assert make_namespace(one).name != make_namespace(PLAIN).name


@pytest.fixture(scope="module")
def of_kind(model, hybrid_model, tmp_path_factory):
    """A tiny model for each kind of attention, and the options that it needs.

    Behind latent attention vLLM on a CPU computes others with two workers than with one. One layer keeps none of that.
    """
    latent = save_latent(tmp_path_factory.mktemp("latent"), num_hidden_layers=1)
    return {
        "full": (model, {}),
        "window": (hybrid_model, {}),
        "latent": (latent, {"prefix_caching_of_mla": True}),
    }


@pytest.mark.parametrize("kind", ["full", "window", "latent"])
def test_v11_the_disk_holds_the_same_blocks_whichever_number_of_workers_stored_them(
    start, of_kind, tmp_path, kind
):
    model, options = of_kind[kind]
    found = {}
    for workers in (1, 2):
        root = tmp_path / str(workers)
        engine = start(
            connector(disk(root, layout="files"), canonical_layout=True),
            model=model,
            processes=workers,
            tensor_parallel_size=workers,
            num_gpu_blocks_override=200,
            **options,
        )
        engine.store(prompt(1, blocks=4))
        wait_until_stored(engine)
        assert engine.close() == 0
        found[workers] = {path.relative_to(root): path.read_bytes() for path in root.rglob("*.kv")}
    one, two = found.values()
    assert one.keys() == two.keys()
    assert len(one) >= 4
    if kind == "latent":
        assert one == two
        return
    for name in one:
        few, many = (np.frombuffer(blocks[name][:-ROOM_BYTES], np.float32) for blocks in (one, two))
        rounding = 1e-3 * np.abs(few).max()
        np.testing.assert_allclose(many, few, rtol=0, atol=rounding)
        of_heads = few.reshape(2, 2, -1)  # (layers, heads, ...)
        exchanged = of_heads[:, ::-1].ravel()
        assert np.abs(few - exchanged).max() > 100 * rounding


def wait_until_stored(engine):
    give_up = time.monotonic() + PATIENCE_S
    on_device = 0
    while not on_device or on_device > metric(engine, 'kvtier_tier_stored_blocks{"tier": "disk"}'):
        assert time.monotonic() < give_up, engine.log()
        engine.generate([1, 2, 3])  # vLLM tells of them with a step
        on_device = metric(engine, "kvtier_device_stored_blocks")


def metric(engine, name):
    return engine.call("metrics").get(f"vllm:{name}", 0)
