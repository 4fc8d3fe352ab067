"""A GGUF model in llama.cpp, and its KV in blocks.

A block's bytes are what llama.cpp writes down of a sequence that has the block's tokens alone: sequence 0 is the
prompt's, sequence 1 holds one block while its bytes are read or written. Decides which models' KV can be cut like that.
"""

import ctypes
import logging
import operator
import threading
from collections.abc import Iterable, Sequence
from ctypes import POINTER, c_char_p, c_int32, c_uint8
from functools import cache
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvtier_core import ClosedError, ConfigError, UnsupportedModelError
from kvtier_llamacpp.binding import F16, FLASH_ATTENTION, LOG_CALLBACK, library
from kvtier_llamacpp.errors import LlamaError

_log = logging.getLogger("kvtier.llamacpp")
_PROMPT, _BLOCK = 0, 1
CHUNK_TOKENS = 512
"""Tokens of one forward pass at most."""
_ERROR = 4
"""``GGML_LOG_LEVEL_ERROR``; what goes on with a line before has 5."""
Bytes = NDArray[np.uint8]


class Context:
    """One model, one prompt at a time. Used by one thread at a time, but for ``tokenize`` and ``detokenize``.

    ``close`` gives the memory back.
    """

    def __init__(
        self, path: Path, *, num_tokens: int, tokens_per_block: int, threads: int, flash_attention: bool
    ) -> None:
        """Load the GGUF file *path* and take memory for the KV of *num_tokens* tokens.

        Raises ``ConfigError`` for a file that llama.cpp can't load, ``UnsupportedModelError`` for a model whose KV
        can't be cut into blocks, and as ``library`` does.
        """
        self._lib = library()
        _log_errors_alone()
        self.tokens_per_block = tokens_per_block
        self._model = self._context = self._vocab = self._memory = None
        self._has_vocab = threading.Lock()
        """Held by whoever reads the vocabulary, from any thread, and by ``close``."""
        try:
            self._model = self._load(path)
            self._vocab = self._lib.llama_model_get_vocab(self._model)
            self.vocab_size: int = self._lib.llama_vocab_n_tokens(self._vocab)
            self.trained_tokens: int = self._lib.llama_model_n_ctx_train(self._model)
            self._check_kind(path)
            self._context = self._open(path, num_tokens, threads, flash_attention)
            self._memory = self._lib.llama_get_memory(self._context)
        except BaseException:
            self.close()
            raise

    def _load(self, path: Path) -> Any:
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = 0
        model = self._lib.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise ConfigError(
                f"{path}: llama.cpp can't load it: give a GGUF file of a model that this build knows (more in the log)"
            )
        return model

    def _check_kind(self, path: Path) -> None:
        kinds = {
            "keeps a state instead of KV": self._lib.llama_model_is_recurrent,
            "keeps a state beside its KV": self._lib.llama_model_is_hybrid,
            "is a diffusion model": self._lib.llama_model_is_diffusion,
            "has an encoder": self._lib.llama_model_has_encoder,
            "has layers with a sliding window": self._lib.llama_model_n_swa,
        }
        for kind, is_of_it in kinds.items():
            if is_of_it(self._model):
                raise UnsupportedModelError(
                    f"{path} ({self.description}) {kind}: kvtier-llamacpp keeps the KV of full attention alone"
                )

    def _open(self, path: Path, num_tokens: int, threads: int, flash_attention: bool) -> Any:  # noqa: FBT001
        params = self._lib.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_batch = params.n_ubatch = min(CHUNK_TOKENS, num_tokens)
        params.n_seq_max = 2
        params.kv_unified = True  # else a sequence can't be copied in part
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        params.type_k = params.type_v = F16
        params.no_perf = True
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            raise LlamaError(
                f"{path}: llama.cpp can't keep {num_tokens} tokens of it, with flash_attention={flash_attention}: try "
                "fewer tokens or the other setting (more in the log)"
            )
        return context

    @property
    def description(self) -> str:
        """What llama.cpp calls the model: architecture, size, quantization."""
        text = ctypes.create_string_buffer(128)
        self._lib.llama_model_desc(self._model, text, len(text))
        return text.value.decode(errors="replace")

    # -- tokens

    def tokenize(self, text: str) -> list[int]:
        """The tokens of *text*, with those that the model wants around it. Markers of roles in it count as such."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise LlamaError(f"the text has half a surrogate pair at character {error.start + 1}") from None
        room = len(data) + 16
        tokens = (c_int32 * room)()
        with self._has_vocab:
            self._check_open()
            count = self._lib.llama_tokenize(self._vocab, data, len(data), tokens, room, True, True)
        if count < 0:
            raise LlamaError(f"llama.cpp can't tokenize a text of {len(data)} bytes")
        return list(tokens[:count])

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of *token_ids*, without special tokens."""
        token_ids = self.check_tokens(token_ids)
        tokens = (c_int32 * len(token_ids))(*token_ids)
        room = 64 * (len(token_ids) + 1)
        with self._has_vocab:
            return self._detokenize(tokens, len(token_ids), room)

    def _detokenize(self, tokens: Any, num_tokens: int, room: int) -> str:
        self._check_open()
        while True:
            text = ctypes.create_string_buffer(room)
            count = self._lib.llama_detokenize(
                self._vocab,
                tokens,
                num_tokens,
                ctypes.cast(text, c_char_p),
                room,
                True,
                False,
            )
            if count >= 0:
                return text.raw[:count].decode(errors="replace")
            room = -count

    def check_tokens(self, token_ids: Iterable[SupportsIndex]) -> tuple[int, ...]:
        """*token_ids* as whole numbers. Raises ``LlamaError`` for one that the model does not know.

        llama.cpp itself would end the process.
        """
        try:
            found = tuple(map(operator.index, token_ids))
        except TypeError:
            raise LlamaError("a prompt is a sequence of token ids: whole numbers") from None
        unknown = next((token for token in found if not 0 <= token < self.vocab_size), None)
        if unknown is not None:
            raise LlamaError(f"the model has no token {unknown}: it knows 0 to {self.vocab_size - 1}")
        return found

    def _check_open(self) -> None:
        if self._model is None:
            raise ClosedError("the model was closed")

    def is_end(self, token_id: int) -> bool:
        """Whether the model ends its answer by this token."""
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token_id))

    # -- the prompt's KV

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is there."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, _PROMPT)) + 1

    def clear(self) -> None:
        """Forget the prompt."""
        self._lib.llama_memory_clear(self._memory, False)

    def decode(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Compute one or more tokens that follow those that are there. The logits ``(vocab,)`` behind the last.

        Raises ``LlamaError`` when llama.cpp can't.
        """
        for begin in range(0, len(token_ids), CHUNK_TOKENS):
            chunk = token_ids[begin : begin + CHUNK_TOKENS]
            tokens = (c_int32 * len(chunk))(*chunk)
            status = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(chunk)))
            if status:
                raise LlamaError(f"llama.cpp can't compute {len(chunk)} tokens: llama_decode says {status}")
        logits = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).copy()

    # -- blocks

    def measure_block(self) -> int:
        """Bytes of the first block of the prompt that is there."""
        with _Sequence(self._lib, self._memory, 0, self.tokens_per_block):
            return int(self._lib.llama_state_seq_get_size(self._context, _BLOCK))

    def read_block(self, index: int, into: Bytes) -> bool:
        """Fill *into* with the prompt's block *index*. Whether it has just that many bytes. Cost: a copy."""
        begin = index * self.tokens_per_block
        with _Sequence(self._lib, self._memory, begin, begin + self.tokens_per_block):
            size = self._lib.llama_state_seq_get_size(self._context, _BLOCK)
            data = into.ctypes.data_as(POINTER(c_uint8))
            return bool(
                size == into.size
                and self._lib.llama_state_seq_get_data(self._context, data, into.size, _BLOCK) == into.size
            )

    def write_block(self, block: Bytes) -> bool:
        """Put the bytes of the prompt's next block behind those that are there. Whether llama.cpp took them."""
        end = self.num_tokens + self.tokens_per_block
        data = block.ctypes.data_as(POINTER(c_uint8))
        taken = self._lib.llama_state_seq_set_data(self._context, data, block.size, _BLOCK) == block.size
        if taken:
            self._lib.llama_memory_seq_cp(self._memory, _BLOCK, _PROMPT, -1, -1)
        self._lib.llama_memory_seq_rm(self._memory, _BLOCK, -1, -1)
        return bool(taken and self.num_tokens == end)

    def close(self) -> None:
        """Give all memory back. Calling it twice is fine."""
        with self._has_vocab:
            if self._context:
                self._lib.llama_free(self._context)
            if self._model:
                self._lib.llama_model_free(self._model)
            self._context = self._model = self._vocab = self._memory = None


class _Sequence:
    """The block's sequence holds the prompt's tokens from *begin* to *end*, inside the ``with`` block."""

    def __init__(self, lib: Any, memory: Any, begin: int, end: int) -> None:
        self._lib, self._memory, self._begin, self._end = lib, memory, begin, end

    def __enter__(self) -> None:
        self._lib.llama_memory_seq_cp(self._memory, _PROMPT, _BLOCK, self._begin, self._end)

    def __exit__(self, *_: object) -> None:
        self._lib.llama_memory_seq_rm(self._memory, _BLOCK, -1, -1)


def _log_error(level: int, text: bytes, _: object) -> None:
    if level == _ERROR and text.strip():
        _log.warning("llama.cpp: %s", text.decode(errors="replace").strip())


@cache
def _log_errors_alone() -> object:
    """llama.cpp writes hundreds of lines to stderr while it loads a model; its errors go to the log.

    Returns what must live as long as the library may call it: the cache keeps it.
    """
    callback = LOG_CALLBACK(_log_error)
    library().llama_log_set(callback, None)
    return callback
