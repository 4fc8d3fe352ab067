"""The device's KV as one sequence of blocks, and the transformers ``Cache`` that reads and writes it in place.

Decides where a token's K and V stand: every layer has one K and one V tensor ``(max_tokens, kv_heads, head_dim)``, so
that ``tokens_per_block`` neighbouring tokens are one contiguous page, and the attention gets a view of the tokens so
far: no gather and no concatenation in a step. A layer with a sliding window keeps all tokens and shows those in the
window. Moves nothing between tiers.

A batch has memory of its own, since padding puts its tokens at any distance from a page's beginning. The blocks hold
one of its sequences at a time, on its way in or out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvtier_core import PoolError
from kvtier_transformers.compat import LAYER_WITHOUT_KV
from kvtier_transformers.errors import CacheError
from kvtier_transformers.layers import LayerKV
from kvtier_transformers.token_log import TokenLog


def _refuse_order(what: str) -> CacheError:
    return CacheError(f"{what}: kvtier's cache keeps each sequence in its place; generate without it")


class BlockLayer(CacheLayerMixin):
    """One attention layer's part of the device's KV. ``keys`` and ``values`` are views.

    Theirs is transformers' shape, ``(sequences, heads, tokens, head_dim)``.

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
        """*keys* and *values* are ``(sequences, max_tokens, kv_heads, head_dim)``, kept and written in place.

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
        keys, values = self._key_tokens[:, begin:end], self._value_tokens[:, begin:end]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def lazy_initialization(self, *_states: torch.Tensor) -> None:
        """Nothing to do: the tensors are there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens' ``(sequences, kv_heads, n, head_dim)`` behind the old; return views of what they see.

        Raises ``CacheError`` before anything is written. Cost: a copy of the new tokens.
        """
        for states in (key_states, value_states):  # under autocast they may differ
            self._check(states)
        begin, end = self._length, self._length + key_states.shape[-2]
        if self._log is not None:
            self._log.written(begin, end - begin)
        self._key_tokens[:, begin:end] = key_states.transpose(1, 2)
        self._value_tokens[:, begin:end] = value_states.transpose(1, 2)
        seen = self._view(self._first_seen(), end)
        self._show(end)
        return seen

    def _check(self, states: torch.Tensor) -> None:
        if self._is_over:
            raise CacheError(
                "this cache is over, and its memory may hold another sequence: use it inside its `with` block only"
            )
        num_sequences, max_tokens = self._key_tokens.shape[:2]
        if states.shape[0] != num_sequences:
            raise CacheError(
                f"a batch of {states.shape[0]} sequences, and this cache was made for {num_sequences}: give cache_for "
                "the whole batch, one row for each sequence that is generated"
            )
        if states.dtype != self._key_tokens.dtype:
            raise CacheError(
                f"the model computes KV in {states.dtype}, the cache was made for {self._key_tokens.dtype}"
            )
        if states.requires_grad:
            raise CacheError(
                "kvtier's cache takes no part in gradients: call the model under torch.no_grad()"
            )
        if self._length + states.shape[-2] > max_tokens:
            raise CacheError(
                f"{self._length + states.shape[-2]} tokens do not fit a cache of {max_tokens}: "
                "open the engine with a larger max_tokens"
            )

    def get_seq_length(self, *_args: Any) -> int:
        """Tokens held."""
        return self._length

    def get_max_length(self) -> int:
        """Tokens that fit, or that a window shows."""
        return self._key_tokens.shape[1] if self._window is None else self._window

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
        """Beam search lets sequences change places: refused."""
        raise _refuse_order("beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """One repetition is no change; more are refused."""
        if repeats != 1:
            raise _refuse_order(f"{repeats} sequences of one prompt")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Selecting all sequences is no change; anything else is refused."""
        count = len(self._key_tokens)
        if indices.tolist() not in ([*range(count)], [True] * count):
            raise _refuse_order("a selection of some sequences")


class DeviceKV:
    """The blocks of one sequence's KV, all layers.

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
        with _no_room(
            f"the KV of {num_tokens} tokens (whole blocks of {tokens_per_block})",
            "pool.block_size or the number of tokens",
        ):
            self.tensors = [
                torch.zeros((num_tokens, *shape), dtype=layer.dtype, device=layer.device)
                for layer in self.layers
                if layer is not None
                for shape in (layer.key_shape, layer.value_shape)
            ]
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

    def cache(
        self, length: int = 0, log: TokenLog | None = None, batch: "BatchMemory | None" = None
    ) -> Cache:
        """A transformers cache over this memory, or that of *batch*, its first *length* tokens already there.

        It takes only what *log* knows of; unset, whatever comes. The caches of one ``DeviceKV`` share its memory: the
        one before is over.
        """
        self.end_cache()
        tensors = iter([tensor.unsqueeze(0) for tensor in self.tensors] if batch is None else batch.tensors)
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


class BatchMemory:
    """The KV of the sequences of a batch, column by column, which goes to and from the blocks of *kv*."""

    def __init__(self, kv: DeviceKV, num_sequences: int) -> None:
        """Room for *num_sequences* as long as *kv* has blocks for. Raises ``PoolError`` when there is not that much."""
        self._blocks = kv.tensors
        with _no_room(
            f"the KV of a batch of {num_sequences} sequences of {kv.max_tokens} tokens",
            "the number of sequences, or the engine's max_tokens",
        ):
            # Not zeros: a CPU gives memory only to what is written then.
            self.tensors = [tensor.new_empty((num_sequences, *tensor.shape)) for tensor in self._blocks]

    def take(self, number: int, begin: int, count: int) -> None:
        """Sequence *number* begins at column *begin* with the *count* tokens that the blocks hold."""
        for tensor, block in zip(self.tensors, self._blocks, strict=True):
            tensor[number, :begin] = 0  # padding is attended to with weight 0, and has to be finite
            tensor[number, begin : begin + count] = block[:count]

    def give(self, number: int, begin: int, count: int) -> None:
        """Write the first *count* tokens of sequence *number*, which begins at column *begin*, into the blocks."""
        for tensor, block in zip(self.tensors, self._blocks, strict=True):
            block[:count] = tensor[number, begin : begin + count]


@contextmanager
def _no_room(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own kind of MemoryError
        raise PoolError(f"{what} can't be allocated: lower {remedy}: {error}") from error
