"""Tiny random models of several kinds as GGUF files. They have no vocabulary but numbers, or but single bytes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.transformers.gguf_writer import f32, write_gguf

VOCAB = 256
WIDTH = 64
HEADS, KV_HEADS, HEAD = 4, 2, 16
INNER, STATE, CONV, RANK = 128, 8, 4, 4
WINDOW = 32


class _Weights:
    def __init__(self) -> None:
        self._choice = np.random.default_rng(0)
        self.tensors = {
            "token_embd.weight": self.matrix(VOCAB, WIDTH),
            "output_norm.weight": self.ones(WIDTH),
        }

    def matrix(self, *shape: int):
        return f32(self._choice.normal(0, 0.25, shape))

    def ones(self, *shape: int):
        return f32(np.ones(shape))

    def add(self, layer: int, **tensors) -> None:
        self.tensors |= {f"blk.{layer}.{name.replace('__', '.')}": value for name, value in tensors.items()}

    def add_attention(self, layer: int) -> None:
        self.add(
            layer,
            attn_norm__weight=self.ones(WIDTH),
            attn_q__weight=self.matrix(HEADS * HEAD, WIDTH),
            attn_k__weight=self.matrix(KV_HEADS * HEAD, WIDTH),
            attn_v__weight=self.matrix(KV_HEADS * HEAD, WIDTH),
            attn_output__weight=self.matrix(WIDTH, HEADS * HEAD),
        )

    def add_mamba(self, layer: int) -> None:
        self.add(
            layer,
            attn_norm__weight=self.ones(WIDTH),
            ssm_in__weight=self.matrix(2 * INNER, WIDTH),
            ssm_conv1d__weight=self.matrix(INNER, CONV),
            ssm_conv1d__bias=self.matrix(INNER),
            ssm_x__weight=self.matrix(RANK + 2 * STATE, INNER),
            ssm_dt__weight=self.matrix(INNER, RANK),
            ssm_dt__bias=self.matrix(INNER),
            ssm_a=f32(-np.ones((INNER, STATE))),
            ssm_d=self.ones(INNER),
            ssm_out__weight=self.matrix(WIDTH, INNER),
        )

    def add_feed_forward(self, layer: int) -> None:
        self.add(
            layer,
            ffn_norm__weight=self.ones(WIDTH),
            ffn_gate__weight=self.matrix(2 * WIDTH, WIDTH),
            ffn_up__weight=self.matrix(2 * WIDTH, WIDTH),
            ffn_down__weight=self.matrix(WIDTH, 2 * WIDTH),
        )


def _write(
    path: Path,
    kind: str,
    layers: int,
    weights: _Weights,
    vocabulary: Mapping[str, object] | None = None,
    /,
    **more: object,
) -> Path:
    of_kind = {
        "block_count": layers,
        "context_length": 2048,
        "embedding_length": WIDTH,
        "vocab_size": VOCAB,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    metadata = {
        "general.architecture": kind,
        **(vocabulary or {"tokenizer.ggml.model": "no_vocab"}),
        **{f"{kind}.{name}": value for name, value in of_kind.items()},
    }
    return write_gguf(path, metadata, weights.tensors)


_ATTENTION = {
    "attention__head_count": HEADS,
    "attention__head_count_kv": KV_HEADS,
    "attention__key_length": HEAD,
    "attention__value_length": HEAD,
    "feed_forward_length": 2 * WIDTH,
}


def write_llama(path: Path, **damage: object) -> Path:
    """Full attention, two layers. *damage* says otherwise than the tensors."""
    weights, layers = _Weights(), 2
    for layer in range(layers):
        weights.add_attention(layer)
        weights.add_feed_forward(layer)
    return _write(path, "llama", layers, weights, **{**_ATTENTION, "rope__dimension_count": HEAD, **damage})


def write_long_rope(path: Path) -> Path:
    """Full attention whose keys are turned by other factors in a context of more than 256 tokens."""
    weights, layers = _Weights(), 2
    for layer in range(layers):
        weights.add_attention(layer)
        weights.add_feed_forward(layer)
    weights.tensors["rope_factors_short.weight"] = weights.ones(HEAD // 2)
    weights.tensors["rope_factors_long.weight"] = f32(np.full(HEAD // 2, 4.0))
    scaling = {"rope__scaling__type": "longrope", "rope__scaling__original_context_length": 256}
    return _write(path, "llama", layers, weights, **_ATTENTION, rope__dimension_count=HEAD, **scaling)


def write_gemma3(path: Path) -> Path:
    """Five layers with a sliding window and one without."""
    weights, layers = _Weights(), 6
    for layer in range(layers):
        weights.add_attention(layer)
        weights.add_feed_forward(layer)
        weights.add(
            layer,
            attn_q_norm__weight=weights.ones(HEAD),
            attn_k_norm__weight=weights.ones(HEAD),
            post_attention_norm__weight=weights.ones(WIDTH),
            post_ffw_norm__weight=weights.ones(WIDTH),
        )
    return _write(path, "gemma3", layers, weights, **_ATTENTION, attention__sliding_window=WINDOW)


_MAMBA = {
    "ssm__conv_kernel": CONV,
    "ssm__inner_size": INNER,
    "ssm__state_size": STATE,
    "ssm__time_step_rank": RANK,
}


def write_mamba(path: Path) -> Path:
    """A state and no KV."""
    weights = _Weights()
    for layer in range(2):
        weights.add_mamba(layer)
    return _write(path, "mamba", 2, weights, **_MAMBA, feed_forward_length=0, attention__head_count=0)


def _bytes() -> dict[str, object]:
    """A vocabulary of the 256 bytes, as GPT-2 writes them: those that don't print stand behind the Latin letters."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    tokens = [chr(byte if byte in printing else next(others)) for byte in range(VOCAB)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
    }


def write_jamba(path: Path, *, has_text: bool = False) -> Path:
    """A layer with a state, and one with KV. With *has_text* its tokens are bytes of texts."""
    weights = _Weights()
    weights.add_mamba(0)
    weights.add(
        0,
        ssm_dt_norm__weight=weights.ones(RANK),
        ssm_b_norm__weight=weights.ones(STATE),
        ssm_c_norm__weight=weights.ones(STATE),
    )
    weights.add_attention(1)
    for layer in range(2):
        weights.add_feed_forward(layer)
    attention = {**_ATTENTION, "attention__head_count_kv": [0, KV_HEADS]}
    return _write(path, "jamba", 2, weights, _bytes() if has_text else None, **attention, **_MAMBA)


def write_bert(path: Path) -> Path:
    """A model of embeddings, which keeps no KV."""
    weights, layers = _Weights(), 2
    del weights.tensors["output_norm.weight"]
    weights.tensors |= {
        "token_types.weight": weights.matrix(2, WIDTH),
        "position_embd.weight": weights.matrix(2048, WIDTH),
        "token_embd_norm.weight": weights.ones(WIDTH),
        "token_embd_norm.bias": weights.ones(WIDTH),
    }
    square, wide = (WIDTH, WIDTH), (2 * WIDTH, WIDTH)
    matrices = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square)
    matrices |= {"ffn_up": wide, "ffn_down": wide[::-1]}
    for layer in range(layers):
        for name, shape in matrices.items():
            weights.add(
                layer,
                **{f"{name}__weight": weights.matrix(*shape), f"{name}__bias": weights.ones(shape[0])},
            )
        for name in ("attn_output_norm", "layer_output_norm"):
            weights.add(
                layer, **{f"{name}__weight": weights.ones(WIDTH), f"{name}__bias": weights.ones(WIDTH)}
            )
    sizes = {"feed_forward_length": 2 * WIDTH, "attention__layer_norm_epsilon": 1e-5}
    vocabulary = {"tokenizer.ggml.model": "no_vocab", "tokenizer.ggml.token_type_count": 2}
    return _write(path, "bert", layers, weights, vocabulary, attention__head_count=HEADS, **sizes)
