import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)

from kvtier_core import UnsupportedModelError
from kvtier_transformers.layers import LayerKV, read_layers
from kvtier_transformers.support import check_config, check_length, check_model
from tests.transformers.tiny import MODELS, SIZES, tiny_model


@pytest.mark.parametrize("kind", MODELS)
def test_supported_models_pass(kind):
    model = tiny_model(kind)
    assert check_model(model) is model


def refusal(model):
    with pytest.raises(UnsupportedModelError) as caught:
        read_layers(check_model(model.eval()))
    message = str(caught.value)
    assert type(model).__name__ in message
    assert "Supported: decoders whose layers have full, sliding-window or chunked attention" in message
    return message


def test_a_sliding_window_is_read_from_the_layers():
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=32)).eval()
    cpu = torch.device("cpu")
    kept = LayerKV(key_shape=(2, 16), value_shape=(2, 16), dtype=torch.float32, device=cpu, window=32)
    assert read_layers(model) == [kept, kept]


def test_mamba_is_refused():
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        read_layers(check_model(MambaForCausalLM(config).eval()))


def test_linear_attention_layers_are_refused_by_name():
    config = Qwen2Config(**SIZES)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention layers"):
        check_config(config)


def test_tokens_that_attend_to_later_ones_are_refused():
    config = Gemma3TextConfig(**SIZES)
    config.use_bidirectional_attention = True
    with pytest.raises(UnsupportedModelError, match="attend to later ones"):
        check_config(config)


def test_c02_a_model_that_looks_ahead_is_found_out_by_running_it():
    config = BertConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    assert "depends on the tokens that follow" in refusal(BertLMHeadModel(config))
    config.is_decoder = True
    assert len(read_layers(BertLMHeadModel(config).eval())) == 2


@pytest.mark.parametrize("window", [2, 8, 10, 15, 16, 17])
def test_c02_a_window_shorter_than_the_tokens_that_follow_is_no_objection(window):
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).eval()
    assert [layer.window for layer in read_layers(model)] == [window, window]


@pytest.mark.parametrize("window", [3, 8, 12, 16])
def test_c02_a_model_with_a_short_window_that_looks_ahead_is_found_out(window):
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).eval()
    model.model.layers[0].register_forward_hook(lambda _, __, states: states + states.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModelError, match="its KV"):
        read_layers(model)


@pytest.mark.parametrize("ordinary", [2, 3, 9, 27, 81])
def test_c02_a_model_of_few_tokens_that_looks_ahead_is_found_out_by_what_follows(ordinary):
    config = BertConfig(
        vocab_size=ordinary + 1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.25,
    )
    assert "depends on the tokens that follow" in refusal(BertLMHeadModel(config))


def test_c02_a_model_whose_every_token_is_special_is_tried_with_those():
    config = LlamaConfig(**SIZES | {"vocab_size": 3, "bos_token_id": 0, "eos_token_id": [1, 2]})
    assert len(read_layers(LlamaForCausalLM(config).eval())) == 2


def test_cross_attention_is_refused():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    assert "cross-attention" in refusal(T5ForConditionalGeneration(T5Config(**sizes)))


def llama_with(**settings):
    name = "rope_parameters" if int(transformers.__version__.split(".")[0]) >= 5 else "rope_scaling"
    return LlamaConfig(**SIZES, **{name: {"rope_theta": 10000.0, **settings}})


def test_positions_that_change_with_the_length_are_served_up_to_it():
    config = llama_with(rope_type="dynamic", factor=2.0)
    check_length(config, 512)
    with pytest.raises(
        UnsupportedModelError, match="'dynamic' rotary positions change in sequences of more than 512"
    ):
        check_length(config, 513)


def test_positions_by_kind_of_layer_are_looked_at_one_by_one():
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
    }
    check_length(config, 64)
    with pytest.raises(UnsupportedModelError, match="'longrope' rotary positions"):
        check_length(config, 65)


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
    message = refusal(
        LlamaForCausalLM(LlamaConfig(**SIZES, layer_types=["full_attention", "linear_attention"])).to("meta")
    )
    assert "linear_attention" in message
    assert "meta" in message


def test_an_adapter_that_was_put_into_the_model_is_refused():
    model = tiny_model()
    lora = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.model.layers[0].self_attn.v_proj = lora(64, 32)
    assert "adapter" in refusal(model)
