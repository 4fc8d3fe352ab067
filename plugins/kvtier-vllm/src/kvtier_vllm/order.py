"""One request's keys in the order of its prompt, and what the last batched lookup said of them.

vLLM asks key by key; kvtier answers from one lookup over all of a request's keys per step. Decides which keys that
lookup is about; what it answers is the coordinator's.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from kvtier_core import LookupState, OffloadKey, get_offload_group_idx

Positions = Mapping[OffloadKey, int]
"""vLLM's own map of a request's keys, which grows in prompt order."""


class Asked(Protocol):
    """The keys of one request and the answers of one step."""

    def answer(self, key: OffloadKey, step: int) -> LookupState:
        """What *key* answers in *step*. The coordinator is asked once a step, or when an earlier key is asked for."""
        ...


class AskedPrefix:
    """A request of one full-attention group: what is asked for is a prefix. vLLM stops at the first miss.

    *ask* answers for keys in prompt order, up to and including the first that ends the prefix. Without *positions* the
    keys are learnt as they are asked for: a key seen for the first time answers RETRY, so that vLLM goes on to the
    next, and all of them are looked up in one batch in the step after.
    """

    def __init__(
        self,
        positions: Positions | None,
        ask: Callable[[Sequence[OffloadKey]], Sequence[LookupState]],
    ) -> None:
        self._positions = positions
        self._ask = ask
        self._keys: list[OffloadKey] = []
        self._index: dict[OffloadKey, int] = {}
        self._step = -1
        self._start = 0
        self._asked: tuple[OffloadKey, ...] = ()
        """Kept as long as it is the same: the coordinator knows a tuple again while its answer is pending."""
        self._states: Sequence[LookupState] = ()

    def answer(self, key: OffloadKey, step: int) -> LookupState:
        """See ``Asked``. Keys behind the one that ended the prefix answer MISS: none can be loaded in this step."""
        self._learn()
        index = self._index.get(key)
        if index is None:
            return self._answer_stranger(key)
        if self._step != step or index < self._start:
            self._look_up(step, index)
        offset = index - self._start
        if offset >= len(self._asked):
            return LookupState.RETRY  # seen since the lookup
        return self._states[offset] if offset < len(self._states) else LookupState.MISS

    def _look_up(self, step: int, start: int) -> None:
        if start != self._start or len(self._asked) != len(self._keys) - start:
            self._asked = tuple(self._keys[start:])
        self._step, self._start = step, start
        self._states = self._ask(self._asked)

    def _answer_stranger(self, key: OffloadKey) -> LookupState:
        if self._positions is not None:
            return LookupState.MISS  # not a key of this request: any doubt is a miss
        self._add(key)
        return LookupState.RETRY

    def _learn(self) -> None:
        if self._positions is not None and len(self._positions) != len(self._keys):
            for key in islice(self._positions, len(self._keys), None):
                self._add(key)

    def _add(self, key: OffloadKey) -> None:
        self._index[key] = len(self._keys)
        self._keys.append(key)


class Shape(Protocol):
    """How one group's blocks cover the tokens."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one of its blocks; the same in all groups here."""
        ...

    @property
    def window(self) -> int | None:
        """Tokens before the end point that it needs; ``None`` for all of them."""
        ...

    def needed(self, end: int) -> range:
        """The blocks that the end point *end* needs."""
        ...


class End(Protocol):
    """The end point of one lookup."""

    @property
    def tokens(self) -> int:
        """Tokens from where the lookup began; 0 when there is nothing."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether nothing is pending."""
        ...


class AskedGroups:
    """A request of several groups, or of sliding windows: what is asked for is an end point that all groups can reach.

    vLLM looks for it group by group, prefixes from their beginning and windows from their end; it is told HIT for just
    the blocks that the end point needs. *groups* are the groups' numbers in keys, *shapes* how they cover tokens; *ask*
    answers for each group's keys from a common token on, and the most tokens from there.
    """

    def __init__(
        self,
        positions: Positions | None,
        groups: Sequence[int],
        shapes: Sequence[Shape],
        ask: Callable[[Sequence[Sequence[OffloadKey]], int], End],
    ) -> None:
        self._positions: Positions = {} if positions is None else positions
        self._number = {group: number for number, group in enumerate(groups)}
        self._shapes = shapes
        self._ask = ask
        self._keys: list[list[OffloadKey]] = [[] for _ in groups]
        self._index: dict[OffloadKey, tuple[int, int]] = {}
        self._begins_anywhere = all(shape.window is not None for shape in shapes)
        self._step = -1
        self._start = 0
        self._asked: tuple[tuple[OffloadKey, ...], ...] = ()
        self._end: End | None = None

    def answer(self, key: OffloadKey, step: int) -> LookupState:
        """See ``Asked``. A key that vLLM's map does not have is a miss."""
        self._learn()
        place = self._index.get(key)
        if place is None:
            return LookupState.MISS
        group, index = place
        # Windows are asked for from their end: where there is nothing else, nothing says where the lookup begins.
        if self._step != step or (index < self._start and not self._begins_anywhere):
            self._look_up(step, 0 if self._begins_anywhere else index)
        assert self._end is not None
        if self._end.tokens == 0:
            return LookupState.MISS if self._end.is_settled else LookupState.RETRY
        if index - self._start not in self._shapes[group].needed(self._end.tokens):
            return LookupState.MISS
        return LookupState.HIT if self._end.is_settled else LookupState.HIT_PENDING

    def _look_up(self, step: int, start: int) -> None:
        count = min(map(len, self._keys)) - start
        if start != self._start or not self._asked or len(self._asked[0]) != count:
            self._asked = tuple(tuple(keys[start : start + count]) for keys in self._keys)
        self._step, self._start = step, start
        self._end = self._ask(self._asked, count * self._shapes[0].tokens_per_block)

    def _learn(self) -> None:
        for key in islice(self._positions, len(self._index), None):
            number = self._number[get_offload_group_idx(key)]
            self._index[key] = number, len(self._keys[number])
            self._keys[number].append(key)
