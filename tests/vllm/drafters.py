"""Tiny drafters for a tiny Llama, and a model that brings its own: their files as training would leave them."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.vllm.engines import VOCAB
from tests.vllm.models import SIZES, WINDOW, save_model

_HIDDEN = SIZES["hidden_size"]
_HEADS = 3
"""Of Medusa: one for each token that it proposes."""


def save_same(directory: Path, target: Path) -> Path:
    """The target itself: all it proposes is right."""
    return Path(shutil.copytree(target, directory))


def save_eagle(directory: Path, target: Path) -> Path:
    """One layer behind the target's last hidden state."""
    shapes = {"fc.weight": (_HIDDEN, 2 * _HIDDEN), **_layer("layers.0.", _HIDDEN)}
    del shapes["layers.0.input_layernorm.weight"]
    return _save(directory, target, {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}, shapes)


def save_eagle3(directory: Path, target: Path) -> Path:
    """One layer behind two of the target's hidden states."""
    return _save(
        directory,
        target,
        {
            "num_hidden_layers": 1,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VOCAB,
            "eagle_aux_hidden_state_layer_ids": [0, 1],
            "num_aux_hidden_states": 2,
        },
        {
            "fc.weight": (_HIDDEN, 2 * _HIDDEN),
            "norm.weight": (_HIDDEN,),
            "lm_head.weight": (VOCAB, _HIDDEN),
            "midlayer.hidden_norm.weight": (_HIDDEN,),
            **_layer("midlayer.", 2 * _HIDDEN),
        },
    )


def save_windowed_eagle3(directory: Path, target: Path) -> Path:
    """One whose layer sees two blocks."""
    return _give_windows(save_eagle3(directory, target))


def save_windowed(directory: Path, target: Path) -> Path:
    """The target's weights, in layers that see two blocks."""
    return _give_windows(save_same(directory, target))


def save_medusa(directory: Path, target: Path) -> Path:
    """Heads without KV."""
    weights = {}
    for head in range(_HEADS):
        weights[f"blocks.{head}.layers.0.weight"] = (_HIDDEN, _HIDDEN)
        weights[f"lm_heads.{head}.weight"] = (VOCAB, _HIDDEN)
    settings = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": _HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": _HEADS,
        "num_hidden_layers": 1,
    }
    return _save(directory, target, settings, weights, is_llama=False)


def save_ernie(directory: Path) -> Path:
    """An ERNIE 4.5 whose checkpoint has a layer that predicts one token more."""
    save_model(
        directory,
        "Ernie4_5_MoeForCausalLM",
        **SIZES,
        moe_intermediate_size=32,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        tie_word_embeddings=False,
    )
    _change_settings(directory, num_nextn_predict_layers=1)
    weights = {
        "model.mtp_emb_norm.0.weight": (_HIDDEN,),
        "model.mtp_hidden_norm.0.weight": (_HIDDEN,),
        "model.mtp_linear_proj.0.weight": (_HIDDEN, 2 * _HIDDEN),
        **_layer("model.mtp_block.0.", _HIDDEN),
    }
    _add_weights(directory, weights)
    return directory


def _layer(prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a Llama's layer."""
    inner = SIZES["intermediate_size"]
    heads = SIZES["num_attention_heads"] * SIZES["head_dim"]
    return {
        f"{prefix}input_layernorm.weight": (_HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (_HIDDEN,),
        **{f"{prefix}self_attn.{name}_proj.weight": (heads, inputs) for name in "qkv"},
        f"{prefix}self_attn.o_proj.weight": (_HIDDEN, heads),
        f"{prefix}mlp.gate_proj.weight": (inner, _HIDDEN),
        f"{prefix}mlp.up_proj.weight": (inner, _HIDDEN),
        f"{prefix}mlp.down_proj.weight": (_HIDDEN, inner),
    }


def _save(
    directory: Path,
    target: Path,
    settings: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    is_llama: bool = True,
) -> Path:
    directory.mkdir()
    of_target = json.loads((target / "config.json").read_text()) if is_llama else {}
    (directory / "config.json").write_text(json.dumps({**of_target, **settings}))
    _add_weights(directory, shapes)
    return directory


def _give_windows(directory: Path) -> Path:
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    _change_settings(directory, layer_types=["sliding_attention"] * layers, sliding_window=WINDOW)
    return directory


def _change_settings(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def _add_weights(directory: Path, shapes: Mapping[str, tuple[int, ...]], seed: int = 3) -> None:
    """Random weights beside those that are there: vectors are norms."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    weights = load_file(path) if path.exists() else {}
    numbers = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        of_norm = torch.ones(shape)
        weights[name] = of_norm if len(shape) == 1 else 0.1 * torch.randn(shape, generator=numbers)
    save_file(weights, path, metadata={"format": "pt"})
