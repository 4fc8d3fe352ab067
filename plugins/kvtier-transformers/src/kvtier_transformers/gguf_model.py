"""Makes a transformers Llama model out of a GGUF file: configuration, weights, nothing compiled.

Decides which GGUF files are understood: architecture ``llama`` with plain rotary positions. Whatever else a file asks
for (scaled positions, biases, experts) is refused by name, because leaving it out would give a model that answers
wrongly.
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


def gguf_config(file: GGUFFile) -> LlamaConfig:
    """The transformers configuration of *file*. Raises ``UnsupportedModelError`` when it is no plain Llama."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported is 'llama'"
        )
    if (scaling := file.metadata.get("llama.rope.scaling.type", "none")) != "none":
        raise UnsupportedModelError(
            f"{file.path}: rotary positions scaled by {scaling!r} are not read from GGUF: use the model's safetensors"
        )
    heads = file.need("llama.attention.head_count")
    hidden = file.need("llama.embedding_length")
    return LlamaConfig(
        vocab_size=len(file.need("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=file.need("llama.feed_forward_length"),
        num_hidden_layers=file.need("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.metadata.get("llama.attention.head_count_kv", heads),
        head_dim=file.metadata.get("llama.attention.key_length", hidden // heads),
        max_position_embeddings=file.need("llama.context_length"),
        rms_norm_eps=file.need("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=file.metadata.get("llama.rope.freq_base", 10000.0),
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
