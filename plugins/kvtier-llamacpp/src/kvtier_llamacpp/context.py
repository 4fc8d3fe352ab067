"""The KV and the state of one prompt of a GGUF model, and their bytes.

A block's bytes are what llama.cpp writes down of a sequence that has the block's tokens alone: sequence 0 is the
prompt's, sequence 1 holds one block while its bytes are read or written. A state is what layers without KV keep of all
tokens so far (Mamba, short convolutions). llama.cpp has the one at the end of what it has computed, and no other.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_int32, c_uint8
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_llamacpp.binding import F16, FLASH_ATTENTION, STATE_ALONE, WHOLE
from kvtier_llamacpp.errors import LlamaError
from kvtier_llamacpp.model import LoadedModel, Model

_PROMPT, _BLOCK = 0, 1
CHUNK_TOKENS = 512
"""Tokens of one forward pass at most."""
Bytes = NDArray[np.uint8]


class Memory(ABC):
    """llama.cpp's memory for one prompt at a time. Used by one thread at a time."""

    def __init__(self, model: LoadedModel, handle: Any, tokens_per_block: int) -> None:
        """*handle* is a context of the model, for two sequences that share their cells."""
        self._lib = model.lib
        self.model = model
        self.handle = handle
        self.tokens_per_block = tokens_per_block
        self._memory: Any = self._lib.llama_get_memory(self.handle)
        self._no_state: Bytes | None = None
        """What llama.cpp writes down of a sequence without a state, where a model has KV and a state."""
        if model.has_kv and model.has_state:
            self._no_state = np.zeros(self._measure(_BLOCK, STATE_ALONE), np.uint8)
            self._read(_BLOCK, STATE_ALONE, self._no_state)

    @property
    def rope(self) -> str:
        """Which factors llama.cpp takes for keys, where the model has some for long contexts and some for short ones.

        The room that the context has decides, not the prompt.
        """
        short = self.model.read_number(b"rope.scaling.original_context_length") or self.model.trained_tokens
        return "long rope" if self._lib.llama_n_ctx(self.handle) > short else "short rope"

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is there."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, _PROMPT)) + 1

    def clear(self) -> None:
        """Forget the prompt."""
        self._lib.llama_memory_clear(self._memory, False)

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Compute one or more tokens that follow those that are there. The logits ``(vocab,)`` behind the last.

        Raises ``LlamaError`` when llama.cpp can't.
        """

    def _logits(self) -> NDArray[np.float32]:
        """A copy of those behind the token computed last."""
        logits = self._lib.llama_get_logits_ith(self.handle, -1)
        return np.ctypeslib.as_array(logits, shape=(self.model.vocab_size,)).copy()

    # -- bytes

    def measure_block(self) -> int:
        """Bytes of the first block of the prompt that is there; 0 for a model without KV."""
        if not self.model.has_kv:
            return 0
        with self._block(0):
            return self._measure(_BLOCK, WHOLE)

    def measure_state(self) -> int:
        """Bytes of the state; 0 for a model without one."""
        return self._measure(_PROMPT, STATE_ALONE) if self.model.has_state else 0

    def read_block(self, index: int, into: Bytes) -> bool:
        """Fill *into* with the prompt's block *index*. Whether it has just that many bytes. Cost: a copy."""
        with self._block(index):
            return self._read(_BLOCK, WHOLE, into)

    def write_block(self, index: int, block: Bytes) -> bool:
        """Put the bytes of block *index* behind those before it. Whether llama.cpp took them, for these tokens.

        A model that has states as well has none then.
        """
        taken = (
            self._write(_BLOCK, WHOLE, block)
            and self._lib.llama_memory_seq_pos_min(self._memory, _BLOCK) == index * self.tokens_per_block
        )
        if taken:
            self._lib.llama_memory_seq_cp(self._memory, _BLOCK, _PROMPT, -1, -1)
        self._lib.llama_memory_seq_rm(self._memory, _BLOCK, -1, -1)
        return taken

    def read_state(self, into: Bytes) -> bool:
        """Fill *into* with the state behind the tokens that are there. Whether it has just that many bytes."""
        return self._read(_PROMPT, STATE_ALONE, into)

    def restore(self, blocks: Bytes, state: Bytes) -> bool:
        """Put the bytes of *blocks* (blocks, bytes) and of the *state* behind them into the empty context.

        Of what the model does not have, there are no bytes. Whether llama.cpp took all, and has as many tokens now.
        """
        has_blocks = not blocks.shape[1] or all(itertools.starmap(self.write_block, enumerate(blocks)))
        has_state = has_blocks and (not state.size or self._write(_PROMPT, STATE_ALONE, state))
        return has_state and self.num_tokens == len(blocks) * self.tokens_per_block

    @contextmanager
    def _block(self, index: int) -> Iterator[None]:
        """Sequence 1 holds the prompt's block *index* and no state, inside the ``with`` block."""
        begin = index * self.tokens_per_block
        self._lib.llama_memory_seq_cp(self._memory, _PROMPT, _BLOCK, begin, begin + self.tokens_per_block)
        if self._no_state is not None:  # the state was copied as well, and is not that of the block
            self._write(_BLOCK, STATE_ALONE, self._no_state)
        try:
            yield
        finally:
            self._lib.llama_memory_seq_rm(self._memory, _BLOCK, -1, -1)

    def _measure(self, sequence: int, what: int) -> int:
        return int(self._lib.llama_state_seq_get_size_ext(self.handle, sequence, what))

    def _read(self, sequence: int, what: int, into: Bytes) -> bool:
        if self._measure(sequence, what) != into.size:
            return False
        data = into.ctypes.data_as(POINTER(c_uint8))
        size = self._lib.llama_state_seq_get_data_ext(self.handle, data, into.size, sequence, what)
        return bool(size == into.size)

    def _write(self, sequence: int, what: int, data: Bytes) -> bool:
        address = data.ctypes.data_as(POINTER(c_uint8))
        size = self._lib.llama_state_seq_set_data_ext(self.handle, address, data.size, sequence, what)
        return bool(size == data.size)


class Context(Memory):
    """Memory of our own. ``close`` gives it back, not the model's."""

    model: Model

    def __init__(
        self, model: Model, *, num_tokens: int, tokens_per_block: int, threads: int, flash_attention: bool
    ) -> None:
        """Take memory for the KV of *num_tokens* tokens. Raises ``LlamaError`` when llama.cpp can't."""
        params = model.lib.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_batch = params.n_ubatch = min(CHUNK_TOKENS, num_tokens)
        params.n_seq_max = 2
        params.kv_unified = True  # else a sequence can't be copied in part
        params.swa_full = True  # else a long answer's blocks leave the window before they are read
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        params.type_k = params.type_v = F16
        params.no_perf = True
        handle = model.lib.llama_init_from_model(model.handle, params)
        if not handle:
            raise LlamaError(
                f"{model.path}: llama.cpp can't keep {num_tokens} tokens of it, with "
                f"flash_attention={flash_attention}: try fewer tokens or the other setting (more in the log)"
            )
        super().__init__(model, handle, tokens_per_block)

    def decode(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """As ``Memory.decode``."""
        for begin in range(0, len(token_ids), CHUNK_TOKENS):
            chunk = token_ids[begin : begin + CHUNK_TOKENS]
            tokens = (c_int32 * len(chunk))(*chunk)
            status = self._lib.llama_decode(self.handle, self._lib.llama_batch_get_one(tokens, len(chunk)))
            if status:
                raise LlamaError(f"llama.cpp can't compute {len(chunk)} tokens: llama_decode says {status}")
        return self._logits()

    def close(self) -> None:
        """Give the memory back. Calling it twice is fine."""
        if self.handle:
            self._lib.llama_free(self.handle)
        self.handle = self._memory = None
