"""llama.cpp's C functions that this package calls, by ctypes, from the library in xllamacpp's wheel.

Names, argument types and structs are those of ``llama.h`` at the build of that wheel (b11549). A struct that has
changed shifts what stands behind it, so the defaults that the library fills in are compared with what they are known to
be before anything else is called.
"""

import ctypes
from collections.abc import Mapping
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_void_p,
)
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from kvtier_core import PluginError

PACKAGE = "xllamacpp"
BUILDS = ("2026.10.11549",)
"""The versions of the package whose structs are those below."""
F16 = 1
FLASH_ATTENTION = {False: 0, True: 1}
WHOLE, STATE_ALONE = 0, 1
"""What is written down of a sequence: all, or what layers without KV keep (``LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY``)."""
LOAD_INTO_MEMORY = 0
"""``LLAMA_LOAD_MODE_NONE``"""
MOST_LAYERS = 512
"""``LLAMA_MAX_LAYERS``"""
GGUF_UINT32, GGUF_STRING = 4, 8


class ModelParams(ctypes.Structure):
    """``llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(ctypes.Structure):
    """``llama_context_params``."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", POINTER(c_int8)),
    )


class ChatMessage(ctypes.Structure):
    """``llama_chat_message``."""

    _fields_ = (("role", c_char_p), ("content", c_char_p))


class GGUFParams(ctypes.Structure):
    """``gguf_init_params``."""

    _fields_ = (("no_alloc", c_bool), ("ctx", c_void_p))


LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)

_OF_ANY_BUILD: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_print_system_info": (c_char_p, ()),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_desc": (c_int32, (c_void_p, c_char_p, c_size_t)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_model_is_hybrid": (c_bool, (c_void_p,)),
    "llama_model_is_diffusion": (c_bool, (c_void_p,)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_model_meta_val_str": (c_int32, (c_void_p, c_char_p, c_char_p, c_size_t)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_min": (c_int32, (c_void_p, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (c_void_p, c_int32)),
    "llama_state_seq_get_size_ext": (c_size_t, (c_void_p, c_int32, c_uint32)),
    "llama_state_seq_get_data_ext": (c_size_t, (c_void_p, POINTER(c_uint8), c_size_t, c_int32, c_uint32)),
    "llama_state_seq_set_data_ext": (c_size_t, (c_void_p, POINTER(c_uint8), c_size_t, c_int32, c_uint32)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
}
"""What takes no struct is the same in every build. Blocks and their names need no more."""
_OF_THIS_BUILD: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gguf_init_from_file": (c_void_p, (c_char_p, GGUFParams)),
    "gguf_free": (None, (c_void_p,)),
    "gguf_find_key": (c_int64, (c_void_p, c_char_p)),
    "gguf_get_kv_type": (c_int32, (c_void_p, c_int64)),
    "gguf_get_val_str": (c_char_p, (c_void_p, c_int64)),
    "gguf_get_val_u32": (c_uint32, (c_void_p, c_int64)),
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LOG_CALLBACK, c_void_p)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_chat_template": (c_char_p, (c_void_p, c_char_p)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_detokenize": (c_int32, (c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool)),
    "llama_chat_apply_template": (
        c_int32,
        (c_char_p, POINTER(ChatMessage), c_size_t, c_bool, c_char_p, c_int32),
    ),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_free": (None, (c_void_p,)),
    "llama_batch_get_one": (Batch, (POINTER(c_int32), c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
}


def bind(path: str, signatures: Mapping[str, tuple[Any, tuple[Any, ...]]] = _OF_ANY_BUILD) -> Any:
    """The library at *path* with the types of *signatures*, unset those of the functions that take no struct.

    The types are this handle's: another handle of the same library keeps its own. Raises ``PluginError`` for what is no
    library of llama.cpp.
    """
    try:
        found = ctypes.CDLL(path)
        for name, (returns, arguments) in signatures.items():
            function = getattr(found, name)
            function.restype, function.argtypes = returns, arguments
    except (OSError, AttributeError) as error:
        raise PluginError(f"kvtier-llamacpp can't use {path}: {error}") from error
    return found


@cache
def library() -> Any:
    """The library, loaded once, every function with its types.

    Raises ``PluginError`` when xllamacpp is missing, of another version, or not what its version says.
    """
    path = _find()
    found = bind(str(path), {**_OF_ANY_BUILD, **_OF_THIS_BUILD})
    context, model = found.llama_context_default_params(), found.llama_model_default_params()
    known = (context.n_batch, context.n_ubatch, context.flash_attn_type, context.type_k, context.type_v)
    if known != (2048, 512, -1, F16, F16) or context.n_samplers or context.ctx_other or model.vocab_only:
        raise PluginError(
            f"kvtier-llamacpp can't use {path}: the structs of its llama.h are not those of {PACKAGE} {BUILDS[-1]}"
        )
    found.llama_backend_init()
    return found


def build() -> str:
    """What identifies the build of llama.cpp, and the instructions that it uses on this processor.

    The format of its states changes from build to build, and its rounding with the instructions.
    """
    return f"{PACKAGE}-{metadata.version(PACKAGE)} ({library().llama_print_system_info().decode()})"


def _find() -> Path:
    spec = util.find_spec(PACKAGE)
    if spec is None:
        raise PluginError(f"kvtier-llamacpp needs llama.cpp: pip install {PACKAGE}=={BUILDS[-1]}")
    version = metadata.version(PACKAGE)
    if version not in BUILDS:
        raise PluginError(
            f"kvtier-llamacpp knows the C interface of {PACKAGE} {', '.join(BUILDS)}, not of the {version} that is "
            f"installed: pip install {PACKAGE}=={BUILDS[-1]}"
        )
    for place in spec.submodule_search_locations or ():
        for path in sorted(Path(place).glob(f"{PACKAGE}*.so")):
            return path
    raise PluginError(
        f"kvtier-llamacpp finds no library of llama.cpp in {PACKAGE} {version}: install it again"
    )
