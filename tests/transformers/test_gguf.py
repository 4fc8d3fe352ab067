import re
import struct

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier_core import ConfigError, UnsupportedModelError
from kvtier_transformers.gguf import GGUFFile
from kvtier_transformers.gguf_model import gguf_config, load_gguf_model
from kvtier_transformers.models import find_smollm2
from tests.transformers.gguf_writer import F16, Q4_1, Q8_0, f32, to_llama_cpp_rope_order, write_gguf
from tests.transformers.tiny import SIZES, VOCAB, tokens

LETTERS = [f"t{number}" for number in range(VOCAB)]
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "tokenizer.ggml.tokens": LETTERS,
}
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama(*, tied):
    sizes = {**SIZES, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "tie_word_embeddings": tied}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def as_gguf(model, path, **extra):
    tensors = {}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        part = name.removesuffix(".weight")
        if part.startswith("model.layers."):
            _, _, index, *rest = part.split(".")
            ours = GGUF_NAMES[".".join(rest)]
            if ours in ("attn_q", "attn_k"):
                values = to_llama_cpp_rope_order(values, 4 if ours == "attn_q" else 2)
            tensors[f"blk.{index}.{ours}.weight"] = f32(values)
        elif part != "lm_head" or not model.config.tie_word_embeddings:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[part]
            tensors[f"{top}.weight"] = f32(values)
    return write_gguf(path, METADATA, tensors | extra)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_written_as_gguf_comes_back_with_the_same_logits(tmp_path, tied):
    model = llama(tied=tied)
    loaded = load_gguf_model(GGUFFile(as_gguf(model, tmp_path / "m.gguf")))
    assert not loaded.training
    assert loaded.dtype == torch.float32
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    ids = torch.tensor([tokens(40)])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def decoded(tmp_path, code, shape, raw):
    return GGUFFile(
        write_gguf(tmp_path / "t.gguf", {"a": 1}, {"pad": f32(np.ones(3)), "x": (code, shape, raw)})
    ).tensor("x")


def test_f16_values(tmp_path):
    values = np.array([[1.5, -2.0, 65504.0], [0.0, 1e-7, -0.25]])
    found = decoded(tmp_path, F16, (2, 3), values.astype("<f2").tobytes())
    np.testing.assert_array_equal(found, values.astype(np.float16).astype(np.float32))


def test_q8_0_values_one_by_one(tmp_path):
    generator = np.random.default_rng(1)
    quants = generator.integers(-128, 128, (6, 32))
    scales = generator.normal(size=6).astype(np.float16)
    raw = b"".join(
        scale.tobytes() + struct.pack("<32b", *row) for scale, row in zip(scales, quants, strict=True)
    )
    found = decoded(tmp_path, Q8_0, (3, 64), raw).reshape(6, 32)
    for block in range(6):
        for item in range(32):
            assert found[block, item] == np.float32(scales[block]) * np.float32(quants[block, item])


def test_q4_1_values_one_by_one(tmp_path):
    generator = np.random.default_rng(2)
    quants = generator.integers(0, 16, (4, 32))
    edges = generator.normal(size=(4, 2)).astype(np.float16)
    raw = b"".join(
        edge.tobytes() + bytes(int(row[i]) | int(row[i + 16]) << 4 for i in range(16))
        for edge, row in zip(edges, quants, strict=True)
    )
    found = decoded(tmp_path, Q4_1, (2, 64), raw).reshape(4, 32)
    for block in range(4):
        scale, minimum = edges[block].astype(np.float32)
        for item in range(32):
            assert found[block, item] == scale * np.float32(quants[block, item]) + minimum


def test_metadata_of_every_kind(tmp_path):
    metadata = {"a": 7, "b": 0.5, "c": True, "d": "text é", "e": [1, 2], "f": ["x", "yy"], "g": [[1], [2, 3]]}
    assert GGUFFile(write_gguf(tmp_path / "m.gguf", metadata, {})).metadata == metadata


def test_an_unknown_tensor_type_is_refused_by_name(tmp_path):
    with pytest.raises(
        UnsupportedModelError, match=r"tensor x has GGUF type 12; supported types are F32, F16, Q4_1, Q8_0"
    ):
        decoded(tmp_path, 12, (256,), bytes(144))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"general.architecture": "gemma"}, "architecture 'gemma' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, r"llama\.rope\.scaling\.type = 'linear'"),
        ({"llama.block_count": None}, r"lacks llama\.block_count"),
    ],
)
def test_a_file_that_asks_for_more_than_a_plain_llama_is_refused(tmp_path, change, problem):
    metadata = {name: value for name, value in (METADATA | change).items() if value is not None}
    with pytest.raises(UnsupportedModelError, match=problem):
        load_gguf_model(GGUFFile(write_gguf(tmp_path / "m.gguf", metadata, {})))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llama.rope.scaling.factor", 4.0),
        ("llama.rope.scale_linear", 2.0),
        ("llama.rope.dimension_count", 8),
        ("llama.rope.scaling.attn_factor", 1.5),
        ("llama.rope.scaling.finetuned", True),
        ("llama.rope.scaling.original_context_length", 64),
        ("llama.rope.freq_scale_of_some_later_release", 1.0),
        ("llama.attention.value_length", 8),
        ("llama.attention.sliding_window", 64),
        ("llama.attention.causal", False),
        ("llama.attention.head_count_kv", [2, 1]),
        ("llama.expert_count", 8),
        ("llama.logit_scale", 0.5),
        ("llama.vocab_size", 100),
        ("llama.rope.freq_base", "large"),
        ("split.count", 2),
        ("general.type", "adapter"),
        ("adapter.lora.alpha", 16.0),
    ],
)
def test_r4_a_setting_that_would_change_the_answers_is_refused_by_name(tmp_path, name, value):
    path = write_gguf(tmp_path / "m.gguf", METADATA | {name: value}, {})
    with pytest.raises(UnsupportedModelError, match=re.escape(f"{name} = {value!r}")):
        gguf_config(GGUFFile(path))


def test_r4_settings_that_say_what_is_so_anyway_are_fine(tmp_path):
    neutral = {
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 1.0,
        "llama.rope.scale_linear": 0.0,
        "llama.rope.scaling.attn_factor": 1.0,
        "llama.rope.scaling.finetuned": False,
        "llama.rope.scaling.original_context_length": 512,
        "llama.rope.dimension_count": 16,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.attention.sliding_window": 0,
        "llama.attention.causal": True,
        "llama.expert_count": 0,
        "llama.vocab_size": VOCAB,
        "split.count": 1,
        "general.type": "model",
        "general.anything": 5,
        "quantize.imatrix.file": "x",
    }
    plain = gguf_config(GGUFFile(write_gguf(tmp_path / "plain.gguf", METADATA, {})))
    told = gguf_config(GGUFFile(write_gguf(tmp_path / "told.gguf", METADATA | neutral, {})))
    assert told.to_dict() == plain.to_dict()


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "blk.x.attn_q.weight"]
)
def test_a_tensor_a_plain_llama_does_not_have_is_refused(tmp_path, name):
    path = as_gguf(llama(tied=True), tmp_path / "m.gguf", **{name: f32(np.ones(4))})
    with pytest.raises(UnsupportedModelError, match=f"tensor {name} is not part of a plain Llama"):
        load_gguf_model(GGUFFile(path))


def test_a_missing_tensor_is_refused_by_name(tmp_path):
    tensors = {"token_embd.weight": f32(np.ones((SIZES["vocab_size"], 64)))}
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight"):
        load_gguf_model(GGUFFile(write_gguf(tmp_path / "m.gguf", METADATA, tensors)))


def test_k2_a_file_cut_off_anywhere_is_an_error_never_a_model(tmp_path):
    whole = as_gguf(llama(tied=True), tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 10, 23, 24, 100, 1000, 4000, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            load_gguf_model(GGUFFile(cut))


def test_a_file_of_another_kind_is_an_error(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match="not a GGUF file"):
        GGUFFile(file)
    with pytest.raises(ConfigError, match="version 9"):
        GGUFFile(write_gguf(file, {}, {}, version=9))


@pytest.mark.real_model
def test_facts_about_smollm2():
    file = GGUFFile(find_smollm2())
    assert len(file.names) == 272
    assert file.metadata["llama.block_count"] == 30
    assert file.metadata["tokenizer.chat_template"].startswith("{% for message in messages %}")
    model = load_gguf_model(file)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.max_position_embeddings == 8192
    assert model.lm_head.weight is model.model.embed_tokens.weight
