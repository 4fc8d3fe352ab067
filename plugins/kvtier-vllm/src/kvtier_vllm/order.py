"""One request's keys in the order of its prompt, and what the last lookup said of them.

vLLM asks key by key; kvtier answers from one lookup over all of a request's keys per step. Decides which keys that
lookup is about; what it answers is the coordinator's.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from math import lcm
from typing import Protocol

from kvtier_core.engine import LookupState, OffloadKey, get_offload_group_idx
from kvtier_vllm.adapters import KeyName, vllms_own

Positions = Mapping[OffloadKey, int]
"""vLLM's own map of a request's keys to the tokens they end at, which grows in prompt order, group by group."""


class GroupShapeLike(Protocol):
    """How one group's blocks cover the tokens."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def window(self) -> int | None:
        """Tokens before the end point that it needs; ``None`` for all of them."""
        ...

    def needed(self, end: int) -> range:
        """The blocks that the end point *end* needs."""
        ...


class LookupLike(Protocol):
    """What one lookup found."""

    @property
    def tokens(self) -> int:
        """The end point, from where the lookup began; while it is pending, the one hoped for."""
        ...

    @property
    def state(self) -> LookupState:
        """``HIT`` or ``MISS`` once nothing is pending."""
        ...


class Asked:
    """The keys of one request, and what one lookup a step says of them.

    vLLM looks for the end point group by group, prefixes from their beginning and windows from their end; it is told
    HIT for just the blocks that the end point of all groups needs. *groups* are the groups' numbers in keys, *shapes*
    how they cover tokens; *ask* answers for each group's keys from a common token on. With one shape all keys are of
    one prefix, whatever their groups. *name* gives kvtier's key for vLLM's.

    Where vLLM begins with a window it says how far it may load: it keeps tokens back to compute, a whole block of them
    for a state. An end point beyond that is looked for again.

    Without *positions* the keys are learnt as they are asked for: a key seen for the first time answers RETRY, so that
    vLLM goes on to the next, and all of them are looked up in one batch in the step after.
    """

    def __init__(
        self,
        positions: Positions | None,
        groups: Sequence[int],
        shapes: Sequence[GroupShapeLike],
        ask: Callable[[Sequence[Sequence[OffloadKey]]], LookupLike],
        name: KeyName = vllms_own,
    ) -> None:
        self._positions = positions
        self._seen = 0
        """Of *positions*."""
        self._number = {group: number for number, group in enumerate(groups)}
        self._shapes = shapes
        self._unit = lcm(*(shape.tokens_per_block for shape in shapes))
        self._ask = ask
        self._name = name
        self._keys: list[list[OffloadKey]] = [[] for _ in shapes]
        self._index: dict[OffloadKey, int] = {}
        """Which of its group's each key is."""
        self._begins_anywhere = all(shape.window is not None for shape in shapes)
        self._bound: int | None = None
        """The token up to which vLLM may load, where that was seen to be less than the keys reach."""
        self._step = -1
        self._start = self._end = 0
        """The tokens that the last lookup was about."""
        self._asked: tuple[tuple[OffloadKey, ...], ...] = ()
        """Kept as long as it is the same: the coordinator knows it again while its answer is pending."""
        self._met: set[int] = set()
        """The groups that vLLM has asked for since that lookup."""
        self._found = 0
        """The end point."""
        self._needed: list[range] = []
        """Of each group, the blocks that the end point needs, from where the lookup began."""
        self._found_prefix = range(0)
        """The keys of a lone prefix that were found, by index; of anything else none."""
        self._state = LookupState.MISS
        """What these answer."""

    def answer(self, key: OffloadKey, step: int) -> LookupState:
        """What *key* answers in *step*.

        The coordinator is asked once a step, or when an earlier key is asked for, or vLLM may load less than was found.
        """
        if self._positions is not None and len(self._positions) != self._seen:
            self._learn(self._positions)
        index = self._index.get(key)
        if index is None:
            return self._answer_stranger(key)
        if self._step == step and index in self._found_prefix:
            return self._state
        group = self._group_of(key)
        shape = self._shapes[group]
        begin = index * shape.tokens_per_block
        # Windows are asked for from their end: where there is nothing else, nothing says where the lookup begins.
        if self._step != step or (begin < self._start and not self._begins_anywhere):
            self._look_up(step, 0 if self._begins_anywhere else begin // self._unit * self._unit)
        if (
            shape.window is not None
            and group not in self._met
            and begin + shape.tokens_per_block < self._found
        ):
            self._bound = begin + shape.tokens_per_block
            self._look_up(step, self._start)
        self._met.add(group)
        if index - self._start // shape.tokens_per_block in self._needed[group]:
            return self._state
        if self._bound is None and self._end <= begin < self._reach():
            return LookupState.RETRY  # seen since the lookup
        return LookupState.MISS

    def _reach(self) -> int:
        """The token up to which every group has keys."""
        return min(
            len(keys) * shape.tokens_per_block for keys, shape in zip(self._keys, self._shapes, strict=True)
        )

    def _look_up(self, step: int, start: int) -> None:
        end = self._reach() if self._bound is None else self._bound
        if (start, end) != (self._start, self._end) or not self._asked:
            self._asked = tuple(
                tuple(keys[start // shape.tokens_per_block : end // shape.tokens_per_block])
                for keys, shape in zip(self._keys, self._shapes, strict=True)
            )
        self._step, self._start, self._end = step, start, end
        self._met.clear()
        found = self._ask(self._asked)
        self._found = start + found.tokens
        is_settled = found.state in (LookupState.HIT, LookupState.MISS)
        self._state = LookupState.HIT if is_settled else found.state
        self._needed = [shape.needed(found.tokens) for shape in self._shapes]
        if len(self._shapes) == 1 and not self._begins_anywhere:
            first = start // self._unit
            self._found_prefix = range(first, first + len(self._needed[0]))

    def _answer_stranger(self, key: OffloadKey) -> LookupState:
        if self._positions is not None:
            return LookupState.MISS  # not a key of this request: any doubt is a miss
        self._add([key])
        return LookupState.RETRY

    def _learn(self, positions: Positions) -> None:
        """Take in the keys that vLLM has added. Those of a block's beginning alone are left out (a partial tail)."""
        new = list(islice(positions, self._seen, None))
        self._seen += len(new)
        self._bound = None
        if len(self._keys) > 1:
            new = [key for key in new if self._is_whole(key, positions[key])]
        self._add(new)

    def _is_whole(self, key: OffloadKey, end: int) -> bool:
        return end % self._shapes[self._group_of(key)].tokens_per_block == 0

    def _add(self, new: Sequence[OffloadKey]) -> None:
        for group, keys in enumerate(self._keys):
            mine = [key for key in new if self._group_of(key) == group] if len(self._keys) > 1 else new
            self._index.update(zip(mine, count(len(keys)), strict=False))
            keys.extend(mine if self._name is vllms_own else map(self._name, mine))

    def _group_of(self, key: OffloadKey) -> int:
        return self._number[get_offload_group_idx(key)] if len(self._keys) > 1 else 0
