"""The KV of one prompt of a GGUF model, and its blocks.

A block's bytes are what llama.cpp writes down of a sequence that has the block's tokens alone: sequence 0 is the
prompt's, sequence 1 holds one block while its bytes are read or written.
"""

from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_uint8
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_llamacpp.binding import F16, FLASH_ATTENTION, library
from kvtier_llamacpp.errors import LlamaError
from kvtier_llamacpp.model import Model

_PROMPT, _BLOCK = 0, 1
CHUNK_TOKENS = 512
"""Tokens of one forward pass at most."""
Bytes = NDArray[np.uint8]


class Context:
    """Memory for one prompt at a time. Used by one thread at a time. ``close`` gives it back, not the model's."""

    def __init__(
        self, model: Model, *, num_tokens: int, tokens_per_block: int, threads: int, flash_attention: bool
    ) -> None:
        """Take memory for the KV of *num_tokens* tokens. Raises ``LlamaError`` when llama.cpp can't."""
        self._lib = library()
        self.model = model
        self.tokens_per_block = tokens_per_block
        params = self._lib.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_batch = params.n_ubatch = min(CHUNK_TOKENS, num_tokens)
        params.n_seq_max = 2
        params.kv_unified = True  # else a sequence can't be copied in part
        params.swa_full = True  # else a long answer's blocks leave the window before they are read
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        params.type_k = params.type_v = F16
        params.no_perf = True
        self.handle: Any = self._lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise LlamaError(
                f"{model.path}: llama.cpp can't keep {num_tokens} tokens of it, with "
                f"flash_attention={flash_attention}: try fewer tokens or the other setting (more in the log)"
            )
        self._memory: Any = self._lib.llama_get_memory(self.handle)

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
            status = self._lib.llama_decode(self.handle, self._lib.llama_batch_get_one(tokens, len(chunk)))
            if status:
                raise LlamaError(f"llama.cpp can't compute {len(chunk)} tokens: llama_decode says {status}")
        logits = self._lib.llama_get_logits_ith(self.handle, -1)
        return np.ctypeslib.as_array(logits, shape=(self.model.vocab_size,)).copy()

    # -- blocks

    def measure_block(self) -> int:
        """Bytes of the first block of the prompt that is there."""
        with _Sequence(self._lib, self._memory, 0, self.tokens_per_block):
            return int(self._lib.llama_state_seq_get_size(self.handle, _BLOCK))

    def read_block(self, index: int, into: Bytes) -> bool:
        """Fill *into* with the prompt's block *index*. Whether it has just that many bytes. Cost: a copy."""
        begin = index * self.tokens_per_block
        with _Sequence(self._lib, self._memory, begin, begin + self.tokens_per_block):
            size = self._lib.llama_state_seq_get_size(self.handle, _BLOCK)
            data = into.ctypes.data_as(POINTER(c_uint8))
            return bool(
                size == into.size
                and self._lib.llama_state_seq_get_data(self.handle, data, into.size, _BLOCK) == into.size
            )

    def write_block(self, block: Bytes) -> bool:
        """Put the bytes of the prompt's next block behind those that are there. Whether llama.cpp took them."""
        end = self.num_tokens + self.tokens_per_block
        data = block.ctypes.data_as(POINTER(c_uint8))
        taken = self._lib.llama_state_seq_set_data(self.handle, data, block.size, _BLOCK) == block.size
        if taken:
            self._lib.llama_memory_seq_cp(self._memory, _BLOCK, _PROMPT, -1, -1)
        self._lib.llama_memory_seq_rm(self._memory, _BLOCK, -1, -1)
        return bool(taken and self.num_tokens == end)

    def close(self) -> None:
        """Give the memory back. Calling it twice is fine."""
        if self.handle:
            self._lib.llama_free(self.handle)
        self.handle = self._memory = None


class _Sequence:
    """The block's sequence holds the prompt's tokens from *begin* to *end*, inside the ``with`` block."""

    def __init__(self, lib: Any, memory: Any, begin: int, end: int) -> None:
        self._lib, self._memory, self._begin, self._end = lib, memory, begin, end

    def __enter__(self) -> None:
        self._lib.llama_memory_seq_cp(self._memory, _PROMPT, _BLOCK, self._begin, self._end)

    def __exit__(self, *_: object) -> None:
        self._lib.llama_memory_seq_rm(self._memory, _BLOCK, -1, -1)
