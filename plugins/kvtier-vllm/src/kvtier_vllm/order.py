"""One request's keys in the order of its prompt, and what the last batched lookup said of them.

vLLM asks key by key and stops at the first miss; kvtier answers from one lookup over all of a request's keys per step.
Decides which keys that lookup is about; what it answers is the coordinator's.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from kvtier_core import LookupState, OffloadKey

AskPrefix = Callable[[Sequence[OffloadKey]], Sequence[LookupState]]
"""Looks up a prefix: a state a key, up to and including the first that ends the prefix."""


class AskedPrefix:
    """Keys and answers of one request. *positions* is vLLM's own map of its keys, which grows in prompt order.

    Without that map (``None``) the keys are learnt as they are asked for: a key seen for the first time answers RETRY,
    so that vLLM goes on to the next, and all of them are looked up in one batch in the step after.
    """

    def __init__(self, positions: Mapping[OffloadKey, int] | None) -> None:
        self._positions = positions
        self._keys: list[OffloadKey] = []
        self._index: dict[OffloadKey, int] = {}
        self._step = -1
        self._start = 0
        self._end = 0
        self._states: Sequence[LookupState] = ()

    def answer(self, key: OffloadKey, step: int, ask: AskPrefix) -> LookupState:
        """What *key* answers in *step*; *ask* is called once a step, or when an earlier key is asked for.

        Keys behind the one that ended the prefix answer MISS: none of them can be loaded in this step.
        """
        self._learn()
        index = self._index.get(key)
        if index is None:
            return self._answer_stranger(key)
        if self._step != step or index < self._start:
            self._step, self._start, self._end = step, index, len(self._keys)
            self._states = ask(self._keys[index:])
        if index >= self._end:
            return LookupState.RETRY
        offset = index - self._start
        return self._states[offset] if offset < len(self._states) else LookupState.MISS

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
