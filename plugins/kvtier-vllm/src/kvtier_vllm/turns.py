"""In which steps a request may be promised a load (C04). Pure.

vLLM stops when a request loads in the step that tells of its preemption. A reset preempts whatever runs, between two
steps, and vLLM tells of that only at the end of the step that asks again. Nor does it tell when a request that was
preempted before runs again: what its device still caches, it does not ask for. So a request that has run is told to
wait, unless it is certain that it did not run in the step before.
"""

from kvtier_core.engine import LookupState


class Turns:
    """One request's questions, step by step. *is_prefix* says that they are about one group of full attention."""

    def __init__(self, *, is_prefix: bool) -> None:
        self._is_prefix = is_prefix
        self._has_run = False
        self._step: int | None = None
        """The last step in which it asked."""
        self._must_wait = False
        self._told = dict.fromkeys(LookupState, 0)
        """What it was told in that step."""
        self._loads = False

    def has_asked(self, step: int) -> bool:
        """Whether it asked in *step*. vLLM asks for requests that have no device blocks, and for them alone."""
        return self._step == step

    def run(self) -> None:
        """It was let run."""
        self._has_run = True

    def load(self) -> None:
        """A load was prepared in the step of the last question."""
        self._loads = True

    def must_wait(self, step: int) -> bool:
        """Whether *step* may be the one that tells of a preemption. The same for all questions of a step."""
        if step != self._step:
            self._must_wait = self._has_run and not (self._step == step - 1 and self._was_put_off())
            self._step = step
            self._told = dict.fromkeys(LookupState, 0)
            self._loads = False
        return self._must_wait

    def tell(self, state: LookupState) -> None:
        """An answer was given. One that ``must_wait`` gave need not be told of."""
        self._told[state] += 1

    def _was_put_off(self) -> bool:
        """Whether it can't have run in the step of the last question.

        It had to wait. Or nothing was certain for it. Or vLLM, promised more than a block, found no room to load them:
        of one block it may have had a part already.
        """
        told = self._told
        is_pending = told[LookupState.HIT_PENDING] + told[LookupState.RETRY] > 0
        if self._is_prefix:
            return not self._loads and (self._must_wait or is_pending or told[LookupState.HIT] > 1)
        return self._must_wait or (is_pending and told[LookupState.HIT] == told[LookupState.MISS] == 0)
