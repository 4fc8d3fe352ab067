"""Tiny random models of every architecture that transformers' engine is tried with: served whole, or refused by name.

A model is *served* when its tokens and first logits are those of transformers' own cache: computed, from the pool, and
from disk by another engine. ``python -m tests.models`` tries them all.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from kvtier_core import UnsupportedModelError
from kvtier_transformers.compat import cache_keyword
from kvtier_transformers.decoding import GreedyDecoder
from kvtier_transformers.engine import Engine
from tests.transformers.tiny import BLOCK, SIZES, VOCAB, tokens, write_settings

_PROMPT, _NEW = 100, 12
_NO_SPECIAL: Mapping[str, Any] = {"eos_token_id": None, "bos_token_id": None}
_HEAD = {**SIZES, "head_dim": 16}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
_STATES = {"layer_types": ["linear_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.25,
    **_NO_SPECIAL,
}
_FEW = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
    **_NO_SPECIAL,
}
_LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "first_k_dense_replace": 1,
    **_ROUTED,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}

SERVED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("llama", SIZES),
    "Llama, dynamic rope, up to its length": (
        "llama",
        {**SIZES, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "Mistral": ("mistral", {**SIZES, "sliding_window": None}),
    "Mistral, window": ("mistral", {**SIZES, "sliding_window": 24}),
    "Mixtral": ("mixtral", {**SIZES, **_LOCAL_EXPERTS}),
    "Ministral 3": ("ministral3", {**SIZES, "head_dim": 16}),
    "Qwen2": ("qwen2", SIZES),
    "Qwen2, window in one layer": (
        "qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "Qwen2-MoE": ("qwen2_moe", {**SIZES, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen3": ("qwen3", _HEAD),
    "Qwen3-MoE": ("qwen3_moe", {**_HEAD, **_EXPERTS}),
    "Gemma": ("gemma", _HEAD),
    "Gemma 2": ("gemma2", {**_HEAD, **_WINDOWS}),
    "Gemma 3": ("gemma3_text", {**_HEAD, **_WINDOWS}),
    "Gemma 3n, layers that share KV": (
        "gemma3n_text",
        {
            **_HEAD,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "intermediate_size": [96] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 24,
            "laurel_rank": 4,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "Gemma 4, heads of two sizes": (
        "gemma4_text",
        {
            **_HEAD,
            **_WINDOWS,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "Phi": ("phi", {**SIZES, "num_key_value_heads": 4}),
    "Phi-3": ("phi3", {**SIZES, "sliding_window": None}),
    "Phi-3, longrope, up to its length": (
        "phi3",
        {
            **SIZES,
            "sliding_window": None,
            "original_max_position_embeddings": 256,
            "rope_parameters": _LONGROPE,
        },
    ),
    "Phi-3.5-MoE": ("phimoe", {**SIZES, **_LOCAL_EXPERTS}),
    "GPT-OSS": ("gpt_oss", {**_HEAD, **_LOCAL_EXPERTS, **_WINDOWS}),
    "OLMo": ("olmo", SIZES),
    "OLMo 2": ("olmo2", SIZES),
    "OLMo 3": ("olmo3", {**SIZES, **_WINDOWS}),
    "OLMoE": ("olmoe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "Granite": ("granite", SIZES),
    "GraniteMoE": ("granitemoe", {**SIZES, **_LOCAL_EXPERTS}),
    "Cohere": ("cohere", SIZES),
    "Cohere 2": ("cohere2", {**SIZES, **_WINDOWS}),
    "StableLM": ("stablelm", SIZES),
    "StarCoder 2": ("starcoder2", {**SIZES, "sliding_window": 24}),
    "GPT-2": ("gpt2", _GPT2),
    "GPT-J": ("gptj", {**_GPT2, "rotary_dim": 8}),
    "GPT-Neo": (
        "gpt_neo",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "initializer_range": 0.25,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 24,
            "max_position_embeddings": 512,
        },
    ),
    "GPT-NeoX": ("gpt_neox", SIZES),
    "GPT-BigCode": ("gpt_bigcode", _GPT2),
    "CodeGen": ("codegen", {**_GPT2, "rotary_dim": 8}),
    "Falcon": ("falcon", _FEW),
    "Falcon, ALiBi": ("falcon", {**_FEW, "alibi": True}),
    "BLOOM": (
        "bloom",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 4,
            "initializer_range": 0.25,
            **_NO_SPECIAL,
        },
    ),
    "MPT": (
        "mpt",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 512,
            "initializer_range": 0.25,
        },
    ),
    "OPT": (
        "opt",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "word_embed_proj_dim": 64,
            "init_std": 0.25,
            **_NO_SPECIAL,
        },
    ),
    "DeepSeek V2, latent attention": ("deepseek_v2", _LATENT),
    "DeepSeek V3, latent attention": ("deepseek_v3", _LATENT),
    "GLM-4": ("glm4", _HEAD),
    "GLM-4-MoE": ("glm4_moe", {**_HEAD, **_ROUTED}),
    "EXAONE 4": ("exaone4", {**SIZES, **_WINDOWS}),
    "ERNIE 4.5": ("ernie4_5", _HEAD),
    "SmolLM3": ("smollm3", SIZES),
    "Nemotron": ("nemotron", SIZES),
    "Apertus": ("apertus", SIZES),
    "Seed-OSS": ("seed_oss", _HEAD),
    "Hunyuan": ("hunyuan_v1_dense", _HEAD),
    "Llama 4, chunks": (
        "llama4_text",
        {
            **_HEAD,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 24,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "BERT as a decoder": ("bert", {**SIZES, "is_decoder": True}),
}
"""By what people call it: the model type, and its configuration."""
REFUSED: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "Mamba": (
        "mamba",
        {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        "linear_attention",
    ),
    "Mamba 2": (
        "mamba2",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
        },
        "linear_attention",
    ),
    "Qwen3-Next, gated delta net": (
        "qwen3_next",
        {**_HEAD, **_EXPERTS, **_STATES, "shared_expert_intermediate_size": 32},
        "linear_attention",
    ),
    "Granite 4": (
        "granitemoehybrid",
        {**SIZES, **_LOCAL_EXPERTS, "layer_types": ["mamba", "attention"]},
        "linear_attention",
    ),
    "Falcon-H1": ("falcon_h1", SIZES, "hybrid"),
    "LFM2": ("lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}, "conv"),
    "MiniMax": ("minimax", {**SIZES, **_LOCAL_EXPERTS, **_STATES}, "linear_attention"),
    "RecurrentGemma": ("recurrent_gemma", SIZES, "linear_attention"),
    "BERT": ("bert", SIZES, "depends on the tokens that follow"),
}
"""With what the refusal has to name."""
_SHORT = 70
_BATCH_HELD = _PROMPT - _SHORT + (_SHORT - 1) // BLOCK * BLOCK
_BATCH = torch.tensor([tokens(_PROMPT), [0] * (_PROMPT - _SHORT) + tokens(_SHORT)])
_MASK = torch.tensor([[1] * _PROMPT, [0] * (_PROMPT - _SHORT) + [1] * _SHORT])
Outcome = tuple[Literal["served", "refused", "fault"], str]


def make(model_type: str, settings: Mapping[str, Any]) -> PreTrainedModel:
    """A random model, always the same one."""
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def load(directory: Path) -> PreTrainedModel:
    """The model that was saved there."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    return model


def try_out(model_type: str, settings: Mapping[str, Any], directory: Path) -> Outcome:
    """What becomes of this model, with all it needs in *directory*, which is empty."""
    saved = directory / "model"
    make(model_type, settings).save_pretrained(saved)
    config, prompt = write_settings(directory), tokens(_PROMPT)
    given, batches = [], []
    try:
        for _ in range(2):  # from files each time: a model's own namespace is what a restart finds
            with Engine.open(load(saved), max_tokens=160, config=config, chunk_tokens=40) as engine:
                given += [engine.generate(prompt, max_tokens=_NEW, ignore_eos=True) for _ in range(2)]
                batches.append(_run_batch(engine))
                assert engine.flush()
    except UnsupportedModelError as error:
        return "refused", str(error)
    model = load(saved)
    decoder = GreedyDecoder(
        model, DynamicCache(config=model.config), chunk_tokens=_PROMPT, on_progress=lambda _: None
    )
    logits = decoder.prefill(prompt)
    right = [int(logits.argmax())]
    while len(right) < _NEW:
        right.append(int(decoder.step(right[-1]).argmax()))
    for result in given:
        if result.token_ids != tuple(right):
            return "fault", f"{result.token_ids} and not {tuple(right)}"
        if not torch.allclose(result.first_logits, logits, atol=1e-3, rtol=1e-3):
            return "fault", f"logits off by {float((result.first_logits - logits).abs().max())}"
    hits = [result.hit_tokens for result in given]
    held = _PROMPT - _PROMPT % BLOCK
    if hits != [0, held, held, held] or given[2].hits_by_tier != {"disk": held}:
        return "fault", f"hits {hits}, {[dict(result.hits_by_tier) for result in given]}"
    right_batch = _generate(model)
    for found, columns in batches:
        if found != right_batch or columns != _BATCH_HELD:
            return "fault", f"a batch with {columns} columns loaded "
            f"gives {[row[_PROMPT:] for row in found]} and not {[row[_PROMPT:] for row in right_batch]}"
    return "served", ""


def _run_batch(engine: Engine) -> tuple[list[list[int]], int]:
    """The answers to a batch of which one prompt is known, and how many columns were loaded."""
    with engine.cache_for(_BATCH, attention_mask=_MASK) as prompt:
        answers = _generate(engine._model, prompt.cache)
        prompt.store(torch.tensor(answers))
        return answers, prompt.hit_tokens


def _generate(model: PreTrainedModel, cache: Cache | None = None) -> list[list[int]]:
    """Transformers' answers to the batch."""
    given = {} if cache is None else {cache_keyword(model): cache}
    output = model.generate(
        _BATCH,
        attention_mask=_MASK,
        do_sample=False,
        min_new_tokens=_NEW,
        max_new_tokens=_NEW,
        pad_token_id=0,
        use_cache=True,  # which MPT leaves out unasked
        **given,
    )
    answers: list[list[int]] = output.tolist()
    return answers


def try_all() -> dict[str, Outcome]:
    """What becomes of each. Another outcome than that of its table is a fault."""
    tried = {**{name: (*model, "") for name, model in SERVED.items()}, **REFUSED}
    found: dict[str, Outcome] = {}
    for name, (model_type, settings, named) in tried.items():
        with tempfile.TemporaryDirectory(prefix="kvtier-model-") as directory:
            try:
                outcome, why = try_out(model_type, settings, Path(directory))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault
                outcome, why = "fault", f"{type(error).__name__}: {error}"
        if (outcome == "refused") != bool(named) or named not in why:
            outcome, why = "fault", f"{outcome}: {why}"
        found[name] = outcome, why
        sys.stderr.write(f"{outcome:8} {name}  {why[:150]}\n")
    return found
