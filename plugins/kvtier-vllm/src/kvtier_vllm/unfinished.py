"""Device transfers that a reset left behind: their rows stay out of use until every worker is done with them (C36).

vLLM forgets its transfers at a reset and drops the workers' reports about them, so the control page has to tell. Each
worker numbers its transfers of a direction one after another, those of its self-test first, then the others as vLLM
hands them over. vLLM hands over all transfers of one step before those of the next. So when a worker's count has
reached the number of transfers issued before the reset, it is done with all of those.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier_core.transfer import ControlPage, Direction


@dataclass(frozen=True, kw_only=True)
class _Left:
    issued: Mapping[Direction, int]
    jobs: Mapping[Direction, list[int]]


class Unfinished:
    """Counts transfers and keeps those that a reset left behind. Used by the scheduler's thread."""

    def __init__(self, control: ControlPage) -> None:
        self._control = control
        self._issued = {direction: _count(control, direction) for direction in Direction}
        self._left: deque[_Left] = deque()

    def __bool__(self) -> bool:
        """Whether anything is left behind."""
        return bool(self._left)

    def count(self, direction: Direction) -> None:
        """A transfer was handed to vLLM."""
        self._issued[direction] += 1

    def leave(self, jobs: Mapping[Direction, list[int]]) -> None:
        """A reset: vLLM will report none of *jobs*."""
        if any(jobs.values()):
            self._left.append(_Left(issued=dict(self._issued), jobs=jobs))

    def take_settled(self) -> list[tuple[Direction, int]]:
        """The jobs left behind whose rows no worker touches any more, now or later."""
        settled: list[tuple[Direction, int]] = []
        while self._left and self._is_over(self._left[0]):
            left = self._left.popleft()
            settled += [(direction, job) for direction, jobs in left.jobs.items() for job in jobs]
        return settled

    def _is_over(self, left: _Left) -> bool:
        return all(self._control.is_settled(direction, count) for direction, count in left.issued.items())


def _count(control: ControlPage, direction: Direction) -> int:
    """How many transfers each worker had in its self-test."""
    counts = {control.get_last_finished(worker, direction) for worker in range(control.num_workers)}
    assert len(counts) == 1, f"the workers' self-tests had {counts} transfers"
    return counts.pop()
