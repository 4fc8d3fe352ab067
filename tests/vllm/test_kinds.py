"""Every kind of layer that vLLM has is served, or refused by the layer's name (C43)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvtier_core import UnsupportedModelError
from kvtier_vllm.refusals import SUPPORTED_KINDS, check_engine
from tests.vllm.engines import needs_vllm
from tests.vllm.facts_of import PLAIN

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def kinds_of(base):
    return {base, *(kind for cls in base.__subclasses__() for kind in kinds_of(cls))}


def layer_of(kind):
    spec = object.__new__(kind)
    return SimpleNamespace(get_kv_cache_spec=lambda config: spec)


def group_of(kind):
    """What is found out of a group with a layer of full attention and one of *kind*, a class of vLLM's."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from kvtier_vllm import inspection

    layers = {"layers.0": layer_of(FullAttentionSpec), "layers.1": layer_of(kind)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
    )
    group = SimpleNamespace(group_id=0, layer_names=tuple(layers), tokens_per_block=32)
    caches = SimpleNamespace(group_data_refs=[[SimpleNamespace(page_size_bytes=64)]])
    return inspection._group(config, group, caches, 0)


@pytest.mark.filterwarnings("ignore")  # what vLLM imports may warn
def test_v3_c43_every_kind_of_kv_that_vllm_has_is_known_or_refused_by_the_layers_name():
    from vllm.v1.kv_cache_interface import KVCacheSpec

    refused = []
    for kind in kinds_of(KVCacheSpec):
        facts = replace(PLAIN, groups=(group_of(kind),))
        if kind.__name__ in SUPPORTED_KINDS:
            check_engine(facts)
            continue
        refused.append(kind.__name__)
        with pytest.raises(UnsupportedModelError, match=f"its layer 'layers.1' keeps {kind.__name__}, "):
            check_engine(facts)
    assert {
        "ChunkedLocalAttentionSpec",
        "SlidingWindowMLASpec",
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "SinkFullAttentionSpec",
        "RSWASpec",
        "CircularBufferSpec",
    } <= set(refused)
