"""Tiny random models for vLLM in fp32, and LoRA adapters: the same for the same seed."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vllm.engines import BLOCK, VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    # weights this large make the output depend on all of the KV
    "initializer_range": 0.25,
}
WINDOW = 2 * BLOCK
SIDE = 32
"""Of an image, in pixels."""
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 512,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + 0.5 * index for index in range(16)],
    },
}
"""Of a Phi 3: vLLM picks the factors by ``max_model_len``, which nothing else in its configuration shows."""


def save_model(directory: Path, model: str, *, seed: int = 0, **settings: Any) -> Path:
    """Transformers' *model* with these settings."""
    import torch
    import transformers

    cls = getattr(transformers, model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        cls(cls.config_class(**settings)).save_pretrained(directory)
    return directory


def save_tiny_model(directory: Path, *, seed: int = 0, **sizes: int) -> Path:
    """A Llama of two layers."""
    return save_model(directory, "LlamaForCausalLM", seed=seed, **{**SIZES, **sizes})


def save_hybrid_model(directory: Path, *, seed: int = 0) -> Path:
    """A Gemma 3 of four layers, every other one with a window of two blocks."""
    return save_model(
        directory,
        "Gemma3ForCausalLM",
        seed=seed,
        **{**SIZES, "num_hidden_layers": 4},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
        tie_word_embeddings=False,
    )


def save_states_model(directory: Path, *, seed: int = 0) -> Path:
    """A Granite 4 of four layers, every other one with the state of a Mamba 2."""
    return save_model(
        directory,
        "GraniteMoeHybridForCausalLM",
        seed=seed,
        **{**SIZES, "num_hidden_layers": 4},
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        mamba_d_state=16,
        mamba_d_head=32,
        mamba_n_heads=4,
        mamba_n_groups=1,
        mamba_chunk_size=BLOCK,
    )


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
        vocab_size=VOCAB,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
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


def save_with_tokenizer(directory: Path) -> Path:
    """The tiny Llama, with digits among its tokens."""
    _make_tokenizer("0123456789").save_pretrained(directory)
    return save_tiny_model(directory)


def save_seeing_model(directory: Path) -> Path:
    """A BLIP-2 of the tiny Llama. An image is half a block of tokens before the text, all with the number 0."""
    from transformers import Blip2Processor, BlipImageProcessor

    tokens = BLOCK // 2
    eye = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    Blip2Processor(
        BlipImageProcessor(size={"height": SIDE, "width": SIDE}),
        _make_tokenizer(["<image>"]),
        num_query_tokens=tokens,
    ).save_pretrained(directory)
    return save_model(
        directory,
        "Blip2ForConditionalGeneration",
        text_config={"model_type": "llama", **SIZES},
        vision_config={**eye, "image_size": SIDE, "patch_size": SIDE // 4, "initializer_range": 0.25},
        qformer_config={**eye, "vocab_size": VOCAB, "initializer_range": 0.25},
        num_query_tokens=tokens,
        image_token_index=0,
        initializer_range=0.25,
    )


def _make_tokenizer(first: Sequence[str]) -> Any:
    """A token a word, the *first* ones as given."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = [*first, *(f"w{number}" for number in range(len(first), VOCAB - 1)), "<end>"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<end>")


def save_adapter(directory: Path, *, seed: int) -> Path:
    """A random LoRA adapter of rank 4 for the tiny Llama's values, or another one in its place."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora"
        weights[f"{name}_A.weight"] = torch.randn(4, 64, generator=numbers)
        weights[f"{name}_B.weight"] = torch.randn(64, 4, generator=numbers)
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


def until_settled(directory: Path) -> None:
    """Return when the files there are so old that another change would get another time."""
    while time.time() < max(file.stat().st_ctime for file in directory.iterdir()) + 2.1:
        time.sleep(0.05)
