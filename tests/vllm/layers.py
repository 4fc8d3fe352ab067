"""Tiny random models, each with a kind of layer of its own."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm.engines import BLOCK, VOCAB
from tests.vllm.models import SIZES, WINDOW, save_model

PLAIN: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 1, "num_local_experts": 2}
GROUPS = {"num_gpu_blocks_override": 100}
"""Room for several KV groups, and for smaller blocks."""


class Kind(NamedTuple):
    """How to make a model, what is said to it where it is refused, and vLLM's options for it."""

    save: Callable[[Path], Path]
    refused: str | None = None
    options: Mapping[str, Any] = {}


def save_whisper(directory: Path) -> Path:
    """A model that listens, with a token a byte."""
    from transformers import WhisperFeatureExtractor, WhisperTokenizer

    WhisperFeatureExtractor(feature_size=16).save_pretrained(directory)
    WhisperTokenizer(vocab={chr(33 + number): number for number in range(90)}, merges=[]).save_pretrained(
        directory
    )
    return save_model(
        directory,
        "WhisperForConditionalGeneration",
        **PLAIN,
        decoder_start_token_id=1,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
    )


LAYERS = {
    "attention sinks, every other layer with a window": Kind(
        partial(
            save_model,
            model="GptOssForCausalLM",
            **SIZES,
            **EXPERTS,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
        options=GROUPS,
    ),
    "chunked local attention": Kind(
        partial(
            save_model,
            model="Llama4ForCausalLM",
            **SIZES,
            **EXPERTS,
            intermediate_size_mlp=96,
            attention_chunk_size=WINDOW,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
        ),
        "its layer 'model.layers.0.self_attn.attn' keeps ChunkedLocalAttentionSpec, a layout kvtier does not know",
        GROUPS,
    ),
    "MLA": Kind(
        partial(
            save_model,
            model="DeepseekV2ForCausalLM",
            **SIZES,
            first_k_dense_replace=2,
            moe_intermediate_size=32,
            n_routed_experts=2,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        "its layer 'model.layers.0.self_attn.attn' keeps MLAAttentionSpec, a layout kvtier does not know",
        GROUPS,
    ),
    "Mamba2": Kind(
        partial(
            save_model,
            model="Mamba2ForCausalLM",
            **PLAIN,
            hidden_size=64,
            num_hidden_layers=2,
            state_size=16,
            num_heads=4,
            head_dim=32,
            n_groups=1,
            chunk_size=BLOCK,
        ),
        "its layer 'backbone.layers.0.mixer' keeps MambaSpec, a layout kvtier does not know",
    ),
    "a gated delta net": Kind(
        partial(
            save_model,
            model="Qwen3NextForCausalLM",
            **SIZES,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        "its layer 'model.layers.0.linear_attn' keeps MambaSpec, a layout kvtier does not know",
        {"num_gpu_blocks_override": 60},
    ),
    "cross attention": Kind(
        save_whisper,
        "its layer '.decoder.layers.0.layers.encoder_attn.attn' keeps CrossAttentionSpec, a layout kvtier does not",
        {"num_gpu_blocks_override": 300, "skip_tokenizer_init": False, "max_model_len": 448},
    ),
}
