"""Which tokens' KV a cache holds, seen as they go through the model: what a caller says of them is checked against it.

Decides whether a forward pass over the cache computes the KV that its token ids stand for. One that does not, since it
has positions or a mask of its own, no ids, or another model, is refused before anything is written.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from kvtier_transformers.batch import BatchedPrompt
from kvtier_transformers.errors import CacheError

_NO_END = torch.iinfo(torch.int64).max


class TokenLog:
    """The tokens of one cache, in order. ``watch`` a model, or every write is refused."""

    def __init__(self, prompts: Sequence[BatchedPrompt], held: int) -> None:
        """The first *held* columns of the *prompts* are in the cache from the start."""
        self._begins = torch.tensor([[prompt.begin] for prompt in prompts])
        self._ends = torch.tensor([[_NO_END if prompt.end is None else prompt.end] for prompt in prompts])
        self._columns = [[*[0] * prompt.begin, *prompt.token_ids][:held] for prompt in prompts]
        self._announced: list[list[int]] | None = None

    def held(self, number: int, columns: int) -> Sequence[int]:
        """What stands in the first *columns* columns of sequence *number*, which is how many the cache holds."""
        return self._columns[number][:columns]

    def written(self, begin: int, count: int) -> None:
        """A forward pass writes *count* columns of KV from column *begin* on, over what was there.

        Raises ``CacheError`` when it is none that was announced.
        """
        announced, self._announced = self._announced, None
        if announced is None or len(announced[0]) != count:
            raise CacheError(
                f"{count} tokens came past the model that the engine was opened with: call that model, and no other, "
                "with this cache"
            )
        for columns, new in zip(self._columns, announced, strict=True):
            columns[begin:] = new

    @contextmanager
    def watch(self, model: PreTrainedModel, cache: Cache) -> Iterator[None]:
        """Learn the tokens of every forward pass of *model* over *cache*, until the ``with`` block ends."""
        # Most models call their base model; OPT calls the decoder inside it. The outer of two calls has the token ids.
        signatures = {
            inner: inspect.signature(inner.forward) for inner in {model.base_model, model.get_decoder()}
        }
        depth = 0

        def before_forward(inner: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal depth
            depth += 1
            signature = signatures[inner]
            given = signature.bind_partial(*args).arguments | kwargs
            is_ours = given.get("cache", given.get("past_key_values")) is cache
            if depth == 1 and is_ours:
                self._announced = self._read(
                    given, cache.get_seq_length(), takes_positions="position_ids" in signature.parameters
                )

        def after_forward(*_: Any) -> None:
            nonlocal depth
            depth -= 1

        with ExitStack() as hooks:
            for inner in signatures:
                hooks.enter_context(inner.register_forward_pre_hook(before_forward, with_kwargs=True))
                hooks.enter_context(inner.register_forward_hook(after_forward, always_call=True))
            yield

    def _read(self, given: Mapping[str, Any], held: int, *, takes_positions: bool) -> list[list[int]]:
        """The tokens of a forward pass with these arguments, over a cache that holds *held* columns."""
        token_ids = given.get("input_ids")
        if not isinstance(token_ids, torch.Tensor):
            raise CacheError(
                "the model was called with inputs_embeds: a prompt's KV is known by its token ids, so pass input_ids"
            )
        if token_ids.dim() != 2 or len(token_ids) != len(self._columns):  # noqa: PLR2004 - sequences, columns
            raise CacheError(
                f"input_ids of shape {tuple(token_ids.shape)}: this cache was made for {len(self._columns)} "
                "sequence(s): give cache_for the whole batch"
            )
        columns = torch.arange(held, held + token_ids.shape[1])
        self._check_positions(given, columns, takes_positions=takes_positions)
        self._check_mask(given.get("attention_mask"), held + token_ids.shape[1])
        found: list[list[int]] = token_ids.tolist()
        return found

    def _check_positions(
        self, given: Mapping[str, Any], columns: torch.Tensor, *, takes_positions: bool
    ) -> None:
        """Every token's position is the number of those before it in its sequence."""
        expected = columns - self._begins  # (sequences, columns)
        is_token = (expected >= 0) & (columns < self._ends)
        positions = given.get("position_ids")
        if positions is None:
            if takes_positions and bool((is_token & (self._begins > 0)).any()):
                raise CacheError(
                    "a batch with padding before its prompts was given without position_ids, and the model would count "
                    "the padding: pass position_ids that begin with 0 at each prompt's first token, as generate does"
                )
        elif _differ(positions, expected, is_token):
            raise _wrong_positions("position_ids", positions, expected)
        rows = given.get("cache_position")  # of releases before 5: columns, whatever is padding
        if rows is not None and _differ(rows, columns, torch.ones_like(columns, dtype=torch.bool)):
            raise _wrong_positions("cache_position", rows, columns)

    def _check_mask(self, mask: object, width: int) -> None:
        """The mask of all *width* columns hides the padding before each prompt, and none of its tokens."""
        if mask is None and not self._begins.any():
            return
        if (
            isinstance(mask, torch.Tensor)
            and mask.shape == (len(self._columns), mask.shape[-1])
            and (mask.shape[-1] == width or not self._begins.any())
        ):
            columns = torch.arange(mask.shape[-1])
            if not _differ(mask != 0, columns >= self._begins, columns < self._ends):
                return
        raise CacheError(
            "attention_mask hides tokens, or is none of (sequences, columns): a prompt's KV is known by all of its "
            "token ids, so pass none, or for a batch with padding the one that cache_for was given, which generate "
            "lengthens"
        )


def _differ(found: torch.Tensor, expected: torch.Tensor, where: torch.Tensor) -> bool:
    """Whether two of ``(sequences, columns)``, or of one row that stands for each, differ *where* it matters."""
    found = found.cpu()
    if found.shape[-1] != expected.shape[-1] or found.dim() > 2:  # noqa: PLR2004
        return True
    return bool(((found != expected) & where).any())


def _wrong_positions(name: str, found: torch.Tensor, expected: torch.Tensor) -> CacheError:
    first, last = expected.reshape(-1)[0], expected.reshape(-1)[-1]
    return CacheError(
        f"the cache holds {first} tokens, so the next have the positions {first} to {last}, and {name} says otherwise "
        f"(it begins with {found.reshape(-1)[:3].tolist()}). Assisted generation and use_cache=False compute loaded "
        "tokens again: generate without them"
    )
