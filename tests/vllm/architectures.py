"""Tiny random models of every architecture that vLLM is tried with: served whole, or refused by name.

``python -m tests.vllm.architectures --json`` tries them all, in vLLM's interpreter. A model is *served* when its tokens
are those of vLLM without a connector: computed, and from the pool and, in another engine, from disk those that vLLM's
own prefix cache gives. Each engine has a process of its own, forked from this one: importing vLLM takes longer than
anything else here.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvtier_core import UnsupportedModelError
from tests.vllm.engine_program import Engine
from tests.vllm.engines import BLOCK, QUIET, VOCAB, connector, disk, engine_options, prompt
from tests.vllm.models import SIZES, WINDOW, save_whisper

_NO_SPECIAL: Mapping[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
_FEW = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.25,
    **_NO_SPECIAL,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
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
_LATENT = {
    **SIZES,
    **_ROUTED,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_MAMBA2 = {
    "mamba_d_state": 16,
    "mamba_d_head": 32,
    "mamba_n_heads": 4,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": BLOCK,
}
_STATES_ALONE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 16,
    "num_heads": 4,
    "head_dim": 32,
    "n_groups": 1,
    "chunk_size": BLOCK,
    **_NO_SPECIAL,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 1024,
    "initializer_range": 0.25,
    **_NO_SPECIAL,
}
_LATENT_CACHED = {"prefix_caching_of_mla": True}
_BY_BLOCKS = {"max_num_batched_tokens": BLOCK}
"""vLLM's kernel for Mamba 2 on a CPU gives no state in the middle of what it computes at once."""


class Model(NamedTuple):
    """A model to try: its type and configuration, vLLM's options for it, and what the refusal names."""

    type: str
    settings: Mapping[str, Any]
    options: Mapping[str, Any] = {}
    refused: str = ""


MODELS: dict[str, Model] = {
    "Llama": Model("llama", SIZES),
    "Mistral, window": Model("mistral", {**SIZES, "sliding_window": WINDOW}),
    "Mixtral": Model("mixtral", {**SIZES, **_LOCAL_EXPERTS}),
    "Qwen2": Model("qwen2", SIZES),
    "Qwen2-MoE": Model("qwen2_moe", {**SIZES, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen3": Model("qwen3", SIZES),
    "Qwen3-MoE": Model("qwen3_moe", {**SIZES, **_EXPERTS}),
    "Gemma": Model("gemma", SIZES),
    "Gemma 2": Model(
        "gemma2",
        {
            **SIZES,
            **_WINDOWS,
            "query_pre_attn_scalar": 32,
            # with fewer layers its embeddings, which are tied, decide alone
            "num_hidden_layers": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 6,
        },
    ),
    "Gemma 3": Model(
        "gemma3_text", {**SIZES, **_WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": False}
    ),
    "Gemma 4, heads of two sizes": Model(
        "gemma4_text",
        {
            **SIZES,
            **_WINDOWS,
            "global_head_dim": 64,
            "tie_word_embeddings": False,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "Phi": Model("phi", SIZES),
    "Phi-3": Model("phi3", {**SIZES, "sliding_window": None}),
    "GPT-OSS": Model("gpt_oss", {**SIZES, **_LOCAL_EXPERTS, **_WINDOWS}),
    "OLMo 2": Model("olmo2", SIZES),
    "OLMoE": Model("olmoe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "Granite": Model("granite", SIZES),
    "Cohere 2": Model("cohere2", {**SIZES, **_WINDOWS, "sliding_window": WINDOW - 1}),
    "StableLM": Model("stablelm", SIZES),
    "StarCoder 2": Model("starcoder2", {**SIZES, "sliding_window": None}),
    "GPT-2": Model("gpt2", _GPT2),
    "GPT-NeoX": Model("gpt_neox", SIZES),
    "Falcon": Model("falcon", {**_FEW, "max_position_embeddings": 2048}),
    "BLOOM": Model(
        "bloom",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 2,
            "initializer_range": 0.25,
            **_NO_SPECIAL,
        },
    ),
    "OPT": Model(
        "opt",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 1024,
            "word_embed_proj_dim": 64,
            "init_std": 0.25,
            **_NO_SPECIAL,
        },
    ),
    "GLM-4": Model("glm4", SIZES),
    "EXAONE 4": Model("exaone4", {**SIZES, **_WINDOWS}),
    "Apertus": Model("apertus", SIZES),
    "DeepSeek V2, latent attention": Model("deepseek_v2", _LATENT, _LATENT_CACHED),
    "DeepSeek V3, latent attention": Model(
        "deepseek_v3", {**_LATENT, "topk_method": "noaux_tc"}, _LATENT_CACHED
    ),
    "DeepSeek V2 without prefix caching": Model(
        "deepseek_v2", _LATENT, refused="its layer 'model.layers.0.self_attn.attn' keeps MLAAttentionSpec"
    ),
    "Mamba 2 without prefix caching": Model(
        "mamba2", _STATES_ALONE, refused="its layer 'backbone.layers.0.mixer' keeps MambaSpec"
    ),
    "Mamba 2": Model("mamba2", _STATES_ALONE, {**_BY_BLOCKS, "enable_prefix_caching": True}),
    "Granite 4": Model(
        "granitemoehybrid",
        {
            **SIZES,
            **_LOCAL_EXPERTS,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"],
            **_MAMBA2,
        },
        _BY_BLOCKS,
    ),
    "Falcon-H1": Model("falcon_h1", {**SIZES, **_MAMBA2}, _BY_BLOCKS),
    "Qwen3-Next, gated delta net": Model(
        "qwen3_next",
        {**SIZES, **_EXPERTS, **_STATES, **_DELTA, "shared_expert_intermediate_size": 32},
        {"dtype": "bfloat16"},
    ),
    "LFM2": Model(
        "lfm2",
        {
            **SIZES,
            "layer_types": ["conv", "full_attention"],
            "conv_dim": 64,
            "conv_dim_out": 64,
            "block_dim": 64,
        },
    ),
    "Llama 4, chunks": Model(
        "llama4_text",
        {
            **SIZES,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
        refused="its layer 'model.layers.0.self_attn.attn' keeps ChunkedLocalAttentionSpec",
    ),
    "Whisper, cross attention": Model(
        "whisper",
        {},
        {"num_gpu_blocks_override": 300, "skip_tokenizer_init": False, "max_model_len": 448},
        refused="its layer '.decoder.layers.0.layers.encoder_attn.attn' keeps CrossAttentionSpec",
    ),
}
"""By what people call it."""
Outcome = tuple[Literal["served", "refused", "fault"], str]


def make(model: Model, directory: Path) -> None:
    """A random model, always the same one."""
    if model.type == "whisper":
        save_whisper(directory)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model.type, **model.settings)).save_pretrained(
        directory
    )


def save_latent(directory: Path, **sizes: int) -> Path:
    """A DeepSeek V2 of the table, with other *sizes*."""
    model = MODELS["DeepSeek V2, latent attention"]
    make(model._replace(settings={**model.settings, **sizes}), directory)
    return directory


def ask_alone(directory: Path, options: Mapping[str, Any]) -> list[list[int]]:
    """The tokens that vLLM without a connector computes, and those it gives after its own prefix cache."""
    engine = Engine(engine_options(directory, **options))
    tokens = [answer(engine) for _ in range(2)]
    engine.close()
    return tokens


def ask_with_kvtier(
    directory: Path, options: Mapping[str, Any], root: Path
) -> tuple[list[list[int]], dict[str, int]]:
    """The tokens with kvtier and a disk, before and after the device forgot what it had; the hits by source."""
    settings = connector(disk(root, pool="8MiB"))
    engine = Engine(engine_options(directory, settings, **options))
    tokens = [answer(engine)]
    engine.generate([[1, 2, 3]])  # vLLM stores in the steps after
    engine.settle()
    assert engine.reset()
    tokens.append(answer(engine))
    hits: dict[str, int] = engine.settle()["hits"]
    engine.close()
    return tokens, hits


def answer(engine: Engine) -> list[int]:
    """The tokens that follow the prompt."""
    tokens: list[int] = engine.generate([prompt(1)])[0]["tokens"]
    return tokens


def try_out(model: Model, directory: Path) -> Outcome:
    """What becomes of this model, with all it needs in *directory*, which is empty."""
    saved, root, options = (
        directory / "model",
        directory / "root",
        {"num_gpu_blocks_override": 100, **model.options},
    )
    apart(make, model, saved)
    try:
        with_kvtier = [apart(ask_with_kvtier, saved, options, root) for _ in range(2)]
    except UnsupportedModelError as error:
        return "refused", str(error)
    computed, cached = apart(ask_alone, saved, options)
    if len(set(computed)) < 3:
        return "fault", f"the output says nothing: {computed}"
    tokens = [each for given, _ in with_kvtier for each in given]
    if tokens != [computed, cached, cached, cached]:
        return "fault", f"{tokens} and not {computed}, then {cached}"
    hits = [found for _, found in with_kvtier]
    if not (hits[0].get("pool") and hits[1].get("disk")):
        return "fault", f"hits {hits}"
    return "served", ""


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What *work* returns in a forked process. Raises what it raises, with the end of its output where it just ends."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryFile() as output:
        process = context.Process(target=_work, args=(theirs, output.fileno(), work, *arguments))
        process.start()
        theirs.close()
        with suppress(EOFError):
            is_good, said = ours.recv()
            process.join()
            if is_good:
                return said
            raise said
        process.join()
        output.seek(0)
        raise ChildProcessError(
            f"ended with {process.exitcode}: {output.read()[-2000:].decode(errors='replace')}"
        )


def _work(answers: Any, output: int, work: Callable[..., Any], *arguments: Any) -> None:
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    try:
        answers.send((True, work(*arguments)))
    except UnsupportedModelError as error:
        answers.send((False, error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault; not every error can be pickled
        answers.send((False, RuntimeError(f"{type(error).__name__}: {error}")))


def main(arguments: list[str] | None = None) -> int:
    """Try all, or those named; the exit status says whether there was a fault, or another outcome than expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.architectures", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("names", nargs="*", help="models of the table; all of them without")
    given = parser.parse_args(arguments)
    prepare()
    found: dict[str, Outcome] = {}
    for name in given.names or MODELS:
        with tempfile.TemporaryDirectory(prefix="kvtier-model-") as directory:
            try:
                outcome, why = try_out(MODELS[name], Path(directory))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault
                outcome, why = "fault", f"{type(error).__name__}: {error}"
        if (outcome == "refused") != bool(MODELS[name].refused) or MODELS[name].refused not in why:
            outcome, why = "fault", f"{outcome}: {why}"
        found[name] = outcome, why
        sys.stderr.write(f"{outcome:8} {name}  {why[:150]}\n")
    if given.json:
        import vllm

        sys.stdout.write(f"{json.dumps({'release': vllm.__version__, 'found': found})}\n")
    return 1 if any(outcome == "fault" for outcome, _ in found.values()) else 0


def prepare() -> None:
    """Import vLLM, once for all processes; nothing of it is used in this one."""
    os.environ.update(QUIET, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
