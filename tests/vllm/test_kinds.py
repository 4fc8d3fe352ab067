"""Every kind of layer that vLLM has is served, or refused by the layer's name (C43)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvtier_core import UnsupportedModelError
from kvtier_vllm.refusals import SUPPORTED_KINDS, check_engine
from tests.vllm.engines import EngineError, connector, needs_vllm, prompt
from tests.vllm.facts_of import PLAIN
from tests.vllm.layers import LAYERS

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
        "MLAAttentionSpec",
        "ChunkedLocalAttentionSpec",
        "SlidingWindowMLASpec",
        "MambaSpec",
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "SinkFullAttentionSpec",
        "RSWASpec",
        "CircularBufferSpec",
    } <= set(refused)


@pytest.mark.parametrize("name", LAYERS)
def test_v3_c43_a_real_model_answers_as_without_connector_or_is_refused_by_the_layers_name(
    start, tmp_path, name
):
    save, refused, options = LAYERS[name]
    model, settings = save(tmp_path / "model"), connector({"pool": {"capacity": "8MiB"}})
    if refused is not None:
        with pytest.raises(EngineError) as raised:
            start(settings, model=model, **options)
        assert refused in str(raised.value)
        return
    wanted = prompt(1)
    plain = start(model=model, enable_prefix_caching=False, **options)
    expected = plain.generate(wanted)
    assert plain.close() == 0
    assert len(set(expected[0])) > 2, "the output says nothing"
    engine = start(settings, model=model, **options)
    assert engine.store(wanted) == expected
    engine.call("settle")
    assert engine.call("reset")
    assert engine.generate(wanted) == expected
    assert engine.call("books")["hits"]["pool"] > 0
    assert engine.close() == 0
