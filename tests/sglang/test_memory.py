"""What of SGLang's KV memory is a block, by the components of its tree. Its pools are stood in for."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier_core import UnsupportedModelError
from kvtier_sglang.memory import find_parts, make_layout

PAGE = 4
SLOTS = 8 * PAGE


def _pool(layer_ids: range) -> SimpleNamespace:
    keys, values = ([torch.zeros(SLOTS, 2, 3) for _ in layer_ids] for _ in range(2))
    return SimpleNamespace(
        k_buffer=keys,
        v_buffer=values,
        model_layer_ids=layer_ids,
        get_key_buffer=dict(zip(layer_ids, keys, strict=True)).__getitem__,
        get_value_buffer=dict(zip(layer_ids, values, strict=True)).__getitem__,
    )


def _windowed() -> SimpleNamespace:
    """Layers 0 and 1 of full attention, layer 2 with a window."""
    full, windows = _pool(range(2)), _pool(range(2, 3))
    pool_of = (full, full, windows)
    return SimpleNamespace(
        full_kv_pool=full,
        swa_kv_pool=windows,
        get_key_buffer=lambda layer: pool_of[layer].get_key_buffer(layer),
        get_value_buffer=lambda layer: pool_of[layer].get_value_buffer(layer),
    )


def _params(kv_pool: Any, *, window: int | None = None) -> SimpleNamespace:
    """With two layers that have states, in 5 slots."""
    kept = SimpleNamespace(conv=[torch.zeros(2, 5, 3, 2)], temporal=torch.zeros(2, 5, 2, 2, 2).half())
    requests = SimpleNamespace(
        mamba_pool=SimpleNamespace(mamba_cache=kept, mamba_layer_ids=[3, 4]),
        mamba2_layer_cache=lambda layer: SimpleNamespace(
            conv=[kept.conv[0][layer - 3]], temporal=kept.temporal[layer - 3]
        ),
    )
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kv_pool),
        page_size=PAGE,
        req_to_token_pool=requests,
        swa_retain_window=window,
    )


def test_each_component_has_blocks_of_its_own():
    parts = find_parts(_params(_windowed(), window=6), ["mamba", "swa", "full"])
    assert [part.name for part in parts] == ["kv", "swa", "mamba"]
    assert [part.window for part in parts] == [None, 2 * PAGE, 1], "SGLang asks for whole pages of a window"
    page = PAGE * 2 * 3 * 4  # bytes of K or V of a layer
    assert make_layout(parts).payload_bytes == (4 * page, 2 * page, 2 * (3 * 2 * 4 + 8 * 2))
    assert [group.num_blocks for group in make_layout(parts).groups] == [8, 8, 5]
    assert "(3, 2) torch.float32; (2, 2, 2) torch.float16" in parts[2].layers


def test_sglang_reads_the_tensors_that_are_copied_in_the_same_order():
    for part in find_parts(_params(_windowed(), window=6), ["full", "swa", "mamba"]):
        copied, read = [tensor.data_ptr() for tensor in part.tensors], part.read()
        assert [tensor.data_ptr() for tensor in read] == copied


def test_pages_are_numbered_by_their_slots_and_states_by_their_own():
    full, states = find_parts(_params(_pool(range(2))), ["full", "mamba"])
    assert full.blocks_of(torch.arange(PAGE, 3 * PAGE)) == [1, 2]
    assert states.blocks_of(torch.tensor([3])) == [3]


@pytest.mark.parametrize(
    ("kv_pool", "components", "named"),
    [
        (_pool(range(2)), ["full", "c128"], "'c128'"),
        (SimpleNamespace(kv_buffer=[torch.zeros(SLOTS, 1)]), ["full"], "K and V alone"),
    ],
)
def test_kv_of_another_kind_is_refused_by_name(kv_pool, components, named):
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        find_parts(_params(kv_pool), components)
