"""The device's KV as one sequence of blocks, and the transformers ``Cache`` that reads and writes it in place.

Decides where a token's K and V stand: every layer has one K and one V tensor ``(max_tokens, kv_heads, head_dim)``, so
that ``tokens_per_block`` neighbouring tokens are one contiguous page, and the attention gets a view of the tokens so
far: no gather and no concatenation in a step. A layer with a sliding window keeps all tokens, too, and shows those in
the window. Holds one sequence at a time. Moves nothing between tiers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvtier_core import PoolError
from kvtier_transformers.compat import LAYER_WITHOUT_KV
from kvtier_transformers.layers import LayerKV
from kvtier_transformers.token_log import CacheError, TokenLog


def _refuse_batch(what: str) -> CacheError:
    return CacheError(f"{what}: kvtier's cache holds one sequence; run the sequences one after another")


class BlockLayer(CacheLayerMixin):
    """One attention layer's part of the device's KV. ``keys`` and ``values`` are views ``(1, heads, seq, head_dim)``.

    With a *window* they show no more than the next token sees: ``window - 1`` tokens. Works with transformers from 4.57
    on: it has the members of both sides of the changes made since.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        length: int,
        *,
        window: int | None = None,
        log: TokenLog | None = None,
    ) -> None:
        """*keys* and *values* are ``(max_tokens, kv_heads, head_dim)``, kept and written in place.

        *log*, which the first layer has, is asked whether a write may be.
        """
        super().__init__()
        self.is_sliding = window is not None
        self._window = window
        self._log = log
        self._key_tokens = keys
        self._value_tokens = values
        self._is_over = False
        self.is_initialized = True
        self._show(length)

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values = self._view(self._first_seen(), length)

    def _first_seen(self) -> int:
        """The first of the tokens held that the next one sees."""
        return 0 if self._window is None else max(0, self._length - self._window + 1)

    def _view(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._key_tokens[begin:end], self._value_tokens[begin:end]
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def lazy_initialization(self, *_states: torch.Tensor) -> None:
        """Nothing to do: the tensors are there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens' ``(1, kv_heads, n, head_dim)`` behind the old ones; return views of what they see.

        Raises ``CacheError`` before anything is written. Cost: a copy of the new tokens.
        """
        for states in (key_states, value_states):  # under autocast they may differ
            self._check(states)
        begin, end = self._length, self._length + key_states.shape[-2]
        if self._log is not None:
            self._log.written(begin, end - begin)
        self._key_tokens[begin:end] = key_states[0].transpose(0, 1)
        self._value_tokens[begin:end] = value_states[0].transpose(0, 1)
        seen = self._view(self._first_seen(), end)
        self._show(end)
        return seen

    def _check(self, states: torch.Tensor) -> None:
        if self._is_over:
            raise CacheError(
                "this cache is over, and its memory may hold another sequence: use it inside its `with` block only"
            )
        if states.shape[0] != 1:
            raise _refuse_batch(f"a batch of {states.shape[0]} sequences")
        if states.dtype != self._key_tokens.dtype:
            raise CacheError(
                f"the model computes KV in {states.dtype}, the cache was made for {self._key_tokens.dtype}"
            )
        if states.requires_grad:
            raise CacheError(
                "kvtier's cache takes no part in gradients: call the model under torch.no_grad()"
            )
        if self._length + states.shape[-2] > len(self._key_tokens):
            raise CacheError(
                f"{self._length + states.shape[-2]} tokens do not fit a cache of {len(self._key_tokens)}: "
                "open the engine with a larger max_tokens"
            )

    def get_seq_length(self, *_args: Any) -> int:
        """Tokens held."""
        return self._length

    def get_max_length(self) -> int:
        """Tokens that fit, or that a window shows."""
        return len(self._key_tokens) if self._window is None else self._window

    def get_max_cache_shape(self) -> int:
        """``get_max_length`` under its name before transformers 5.24."""
        return self.get_max_length()

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """Length and offset of the keys that *query* new tokens attend to.

        Releases before 5 pass the positions of the new tokens instead of their number.
        """
        count = query.shape[0] if isinstance(query, torch.Tensor) else query
        first = self._first_seen()
        return self._length - first + count, first

    def activate_past_recording(self) -> None:
        """Nothing to do: tokens that have left the window are still here, so that ``crop`` can go back to them."""

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self._show(0)

    def end(self) -> None:
        """Forget all tokens, and take no more: the memory is somebody else's now."""
        self._is_over = True
        self._show(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens. Positive numbers mean different things by version: refused."""
        if tokens_to_remove > 0:
            raise CacheError(f"crop({tokens_to_remove}): pass the number of tokens to remove, negative")
        self._show(max(0, self._length + tokens_to_remove))

    def reorder_cache(self, *_beam_idx: torch.Tensor) -> None:
        """Beam search needs several sequences: refused."""
        raise _refuse_batch("beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """One repetition is no change; more need several sequences: refused."""
        if repeats != 1:
            raise _refuse_batch(f"{repeats} sequences of one prompt")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Selecting the one sequence is no change; anything else is refused."""
        if indices.tolist() not in ([0], [True]):
            raise _refuse_batch("a selection of several sequences")


class DeviceKV:
    """The memory of one sequence's KV, all layers.

    ``tensors`` is ``[K of layer 0, V of layer 0, K of layer 1, ...]`` of the layers that keep any, each
    ``(max_tokens, kv_heads, head_dim)`` and each viewable as ``(num_blocks, page_bytes)``: the device pages kvtier
    transfers.
    """

    def __init__(self, layers: Sequence[LayerKV | None], *, max_tokens: int, tokens_per_block: int) -> None:
        """Allocate room for *max_tokens* tokens, rounded up to whole blocks of *tokens_per_block*.

        *layers* are those of ``read_layers``. Raises ``PoolError`` when there is not that much memory.
        """
        self.tokens_per_block = tokens_per_block
        self.num_blocks = -(-max_tokens // tokens_per_block)
        self.layers = tuple(layers)
        num_tokens = self.num_blocks * tokens_per_block
        try:
            self.tensors = [
                torch.zeros((num_tokens, *shape), dtype=layer.dtype)
                for layer in self.layers
                if layer is not None
                for shape in (layer.key_shape, layer.value_shape)
            ]
        except RuntimeError as error:  # torch's own kind of MemoryError
            raise PoolError(
                f"the KV of {num_tokens} tokens (whole blocks of {tokens_per_block}) can't be allocated: lower "
                f"pool.block_size or the number of tokens: {error}"
            ) from error
        self._layers: list[BlockLayer] = []

    @property
    def max_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_blocks * self.tokens_per_block

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(tensor.nbytes for tensor in self.tensors) // self.num_blocks

    def block_tensors(self) -> list[torch.Tensor]:
        """The tensors by block, each ``(num_blocks, items of a page)``, sharing memory: what a KV layout takes."""
        return [tensor.view(self.num_blocks, -1) for tensor in self.tensors]

    def cache(self, length: int = 0, log: TokenLog | None = None) -> Cache:
        """A transformers cache over this memory, its first *length* tokens already there.

        It takes only what *log* knows of; unset, whatever comes. The caches of one ``DeviceKV`` share its memory: the
        one before is over.
        """
        self.end_cache()
        tensors = iter(self.tensors)
        layers: list[Any] = []
        for layer in self.layers:
            if layer is None:
                layers.append(LAYER_WITHOUT_KV())
                continue
            made = BlockLayer(next(tensors), next(tensors), length, window=layer.window, log=log)
            log = None
            self._layers.append(made)
            layers.append(made)
        return Cache(layers=layers)

    def end_cache(self) -> None:
        """Let the cache in use, if any, write no more: the copies of its blocks may be under way."""
        for layer in self._layers:
            layer.end()
        self._layers.clear()
