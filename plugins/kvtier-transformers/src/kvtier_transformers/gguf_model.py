"""Makes a transformers Llama model out of a GGUF file: configuration, weights, nothing compiled.

Decides which GGUF files are understood: architecture ``llama`` with plain rotary positions. Whatever else a file asks
for (scaled positions, biases, experts, a setting of a later release) is refused by name, because leaving it out would
give a model that answers wrongly.
"""

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier_core import UnsupportedModelError
from kvtier_transformers.compat import no_progress_bar
from kvtier_transformers.gguf import Floats, GGUFFile

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_DESCRIPTIONS = r"general\.(?!architecture$|type$)|quantize\.|imatrix\.|tokenizer\."
"""Metadata that says nothing of how the model computes, or that the tokenizer is made of."""
_READ = (
    *("llama.context_length", "llama.embedding_length", "llama.block_count", "llama.feed_forward_length"),
    *("llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length"),
    *("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"),
)
_NEUTRAL = {
    "general.architecture": ("llama",),
    "general.type": ("model",),
    "split.no": (0,),
    "split.count": (0, 1),
    "split.tensors.count": None,
    "llama.tensor_data_layout": ("Meta AI original pth",),
    "llama.attention.causal": (True,),
    "llama.attention.sliding_window": (0,),
    "llama.expert_count": (0,),
    "llama.expert_used_count": (0,),
    "llama.leading_dense_block_count": (0,),
    "llama.pooling_type": (0,),
    "llama.logit_scale": (1.0,),
    "llama.rope.scale_linear": (0.0, 1.0),
    "llama.rope.scaling.type": ("none",),
    "llama.rope.scaling.factor": (0.0, 1.0),
    "llama.rope.scaling.attn_factor": (1.0,),
    "llama.rope.scaling.finetuned": (False,),
    "llama.rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Settings that are not read, by the values with which a plain Llama computes the same: 0 stands for unset."""


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """The transformers configuration of *file*. Raises ``UnsupportedModelError`` when it is no plain Llama."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported is 'llama'"
        )
    heads = file.number("llama.attention.head_count")
    hidden = file.number("llama.embedding_length")
    head_dim = file.number("llama.attention.key_length", hidden // heads)
    tokens, context = len(file.need("tokenizer.ggml.tokens")), file.number("llama.context_length")
    implied = {
        "llama.vocab_size": (tokens,),
        "llama.attention.value_length": (head_dim,),
        "llama.rope.dimension_count": (head_dim,),
        "llama.rope.scaling.original_context_length": (context,),
    }
    file.refuse_other_settings(dict.fromkeys(_READ) | _NEUTRAL | implied, but=_DESCRIPTIONS)
    return LlamaConfig(
        vocab_size=tokens,
        hidden_size=hidden,
        intermediate_size=file.number("llama.feed_forward_length"),
        num_hidden_layers=file.number("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.number("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=file.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=file.number("llama.rope.freq_base", 10000.0),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings="output.weight" not in file.names,
    )


def _from_rope_order(rows: Floats, heads: int) -> Floats:
    """llama.cpp rotates neighbouring pairs of rows, transformers the two halves of a head: sort rows into halves."""
    outputs, inputs = rows.shape
    pairs = rows.reshape(heads, outputs // heads // 2, 2, inputs)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(outputs, inputs)


def _layer_name(gguf_name: str) -> tuple[str, str] | None:
    """``blk.3.attn_q.weight`` as its transformers name and ``attn_q``, or ``None`` when that is not a known name."""
    match gguf_name.split("."):
        case ["blk", index, part, "weight"] if index.isdecimal() and part in _LAYER_NAMES:
            return f"model.layers.{index}.{_LAYER_NAMES[part]}.weight", part
        case _:
            return None


def gguf_state_dict(file: GGUFFile, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Every weight of *file* in fp32 under its transformers name.

    Raises ``UnsupportedModelError`` naming a tensor that a plain Llama does not have.
    """
    head_counts = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state: dict[str, torch.Tensor] = {}
    for gguf_name in file.names:
        if gguf_name in _TOP_NAMES:
            state[_TOP_NAMES[gguf_name]] = torch.from_numpy(file.tensor(gguf_name))
            continue
        known = _layer_name(gguf_name)
        if known is None:
            raise UnsupportedModelError(
                f"{file.path}: tensor {gguf_name} is not part of a plain Llama model: use the model's safetensors"
            )
        name, part = known
        values = file.tensor(gguf_name)
        if part in head_counts:
            values = _from_rope_order(values, head_counts[part])
        state[name] = torch.from_numpy(values)
    return state


def load_gguf_model(file: GGUFFile) -> LlamaForCausalLM:
    """The model of *file* in fp32 on the CPU, ready to generate. Cost: the weights once in memory."""
    config = gguf_config(file)
    state = gguf_state_dict(file, config)
    with no_progress_bar():
        # Constructing the model directly would first draw 135 million random weights, 3 s for SmolLM2.
        model, report = LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    wrong = {problem: names for problem, names in report.items() if names}
    if wrong:
        raise UnsupportedModelError(f"{file.path}: the weights are not those of a plain Llama model: {wrong}")
    model.name_or_path = str(file.path)
    return model
