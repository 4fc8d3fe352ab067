import pytest
import torch
import transformers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvtier_core import UnsupportedModelError
from kvtier_transformers.support import check_config, check_model
from tests.transformers.tiny import MODELS, SIZES, tiny_model


@pytest.mark.parametrize("kind", MODELS)
def test_supported_models_pass(kind):
    model = tiny_model(kind)
    assert check_model(model) is model


def refusal(model):
    with pytest.raises(UnsupportedModelError) as caught:
        check_model(model.eval())
    message = str(caught.value)
    assert type(model).__name__ in message
    assert "Supported: models of type llama, mistral, qwen2, qwen3 with full_attention layers" in message
    return message


def test_sliding_window_layers_are_refused_by_name():
    config = MistralConfig(**SIZES, sliding_window=32)
    assert "sliding_attention layers" in refusal(MistralForCausalLM(config))


def test_one_sliding_window_layer_among_full_ones_is_refused():
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1)
    assert "sliding_attention layers" in refusal(Qwen2ForCausalLM(config))


def test_mamba_is_refused():
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    assert "'mamba' is not one of" in refusal(MambaForCausalLM(config))


def test_linear_attention_layers_are_refused_by_name():
    config = Qwen2Config(**SIZES)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention layers"):
        check_config(config)


def test_chunked_attention_layers_are_refused_by_name():
    config = LlamaConfig(**SIZES)
    config.attention_chunk_size = 32
    with pytest.raises(UnsupportedModelError, match="chunked_attention layers"):
        check_config(config)


def test_cross_attention_is_refused():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    assert "cross-attention" in refusal(T5ForConditionalGeneration(T5Config(**sizes)))


def test_a_model_type_nobody_vouches_for_is_refused():
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    assert "'gpt2' is not one of" in refusal(GPT2LMHeadModel(config))


def test_positions_that_depend_on_the_length_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    name = "rope_parameters" if int(transformers.__version__.split(".")[0]) >= 5 else "rope_scaling"
    assert "'dynamic' rotary positions" in refusal(LlamaForCausalLM(LlamaConfig(**SIZES, **{name: rope})))


def test_training_mode_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
        check_model(tiny_model().train())


def test_another_device_is_refused():
    assert "it is on meta" in refusal(tiny_model().to("meta"))


def test_an_adapter_is_refused():
    model = tiny_model()
    model._hf_peft_config_loaded = True
    assert "adapter" in refusal(model)


def test_what_is_no_transformers_model_is_refused():
    assert "not a transformers model" in refusal(torch.nn.Linear(2, 2))


def test_every_reason_is_told_at_once():
    message = refusal(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=32)).to("meta"))
    assert "sliding_attention" in message
    assert "meta" in message


def test_sliding_window_layers_stay_refused_though_the_configuration_was_changed():
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1)
    model = Qwen2ForCausalLM(config)
    config.layer_types = ["full_attention"] * 2
    assert "sliding_attention layers, whatever its configuration says" in refusal(model)


def test_an_adapter_that_was_put_into_the_model_is_refused():
    model = tiny_model()
    lora = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.model.layers[0].self_attn.v_proj = lora(64, 32)
    assert "adapter" in refusal(model)


def test_positions_by_kind_of_layer_are_looked_at_one_by_one():
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "longrope", "rope_theta": 1e4},
    }
    with pytest.raises(UnsupportedModelError, match="'longrope' rotary positions"):
        check_config(config)
