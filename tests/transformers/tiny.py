"""Tiny random models and a byte tokenizer: whole-engine tests in seconds."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvtier_transformers.cache import DeviceKV
from kvtier_transformers.layers import read_layers

BLOCK = 16
VOCAB = 257
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    # weights this large make the output depend on all of the KV
    "initializer_range": 0.25,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}


def tiny_model(kind: str = "llama", *, seed: int = 0) -> PreTrainedModel:
    """A model of two layers, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[kind]().eval()


def device_kv(model: PreTrainedModel, *, max_tokens: int = 64, tokens_per_block: int = BLOCK) -> DeviceKV:
    """The memory of one sequence's KV."""
    return DeviceKV(read_layers(model), max_tokens=max_tokens, tokens_per_block=tokens_per_block)


def tokens(count: int, *, seed: int = 0) -> list[int]:
    """*count* token ids, the same for the same seed; a longer list begins with the shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (512,), generator=generator).tolist()[:count]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {letter: number for number, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def save_model(model: PreTrainedModel, directory: Path) -> Path:
    """*model* and a byte tokenizer as a transformers directory."""
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def write_settings(directory: Path, *, capacity: str = "4MiB") -> Path:
    """A configuration with a small pool and a disk tier in *directory*."""
    file = directory / "kvtier.toml"
    root = directory / "blocks"
    file.write_text(
        f'[pool]\ncapacity = "{capacity}"\nblock_size = {BLOCK}\n\n[tiers.disk]\ntype = "disk"\nroot = "{root}"\n'
    )
    return file
