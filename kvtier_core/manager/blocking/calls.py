"""The one place where a blocking tier's methods are called, and where whatever they do wrong is caught (C30).

Every call ends as one outcome a key: ``True`` (stored, filled, there), ``False`` (absent, or not stored for lack of
room), ``HELD`` (there already, it was not stored) or a ``Fault``. An answer is read inside the guard, because it may be
computed, and fail, only then.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from kvtier_core.blocktier import BlockTier, SupportsBatch, SupportsFollow, SupportsHolds
from kvtier_core.errors import TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.guard import Guard, describe, text_of
from kvtier_core.transfer.waiting import bounded

_T = TypeVar("_T")


_TRANSIENT = (ConnectionError, TimeoutError)
"""What any tier raises when the same call may well succeed in a moment; a type may name more."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a key could not be served, in words."""

    text: str
    is_transient: bool = False
    """Whether the same call may well succeed in a moment."""
    is_end: bool = False
    """The tier was reset or shut down before the call was made."""


class Held(enum.Enum):
    """A store that was not needed."""

    HELD = "held"


CallOutcome = bool | Fault | Held


class TierCalls:
    """Calls one tier; safe from any thread as far as the tier is.

    Views of rows are released after the call, so that a tier that kept one gets an error and not another block's row.
    An array made over the view that the tier still holds is noticed, and a fault of the call, but can't be taken back.
    A slice that it still holds (``into[:]``) is not even noticed. A later write through either lands in the row: before
    its proof is checked that makes a miss, after it wrong bytes.
    """

    def __init__(self, tier: BlockTier, guard: Guard) -> None:
        self._guard = guard
        self._tier = tier
        self._batch = tier if isinstance(tier, SupportsBatch) else None
        self._asked = tier if isinstance(tier, SupportsHolds) else None
        self._transient: tuple[type[Exception], ...] = (*_TRANSIENT, *tier.transient)

    @property
    def asks(self) -> bool:
        """Whether the tier can be asked before a store."""
        return self._asked is not None

    @property
    def batches(self) -> bool:
        """Whether ``store`` and ``load`` move several blocks in one call."""
        return self._batch is not None

    def contains(self, keys: Sequence[OffloadKey]) -> list[CallOutcome]:
        """Ask which keys are stored; one call."""
        return self._ask_many("contains", len(keys), lambda: self._tier.contains(keys))

    def holds(self, keys: Sequence[OffloadKey]) -> list[CallOutcome]:
        """Ask which blocks need not be stored; one call."""
        asked = self._asked
        assert asked is not None, "a question for a tier that answers none"
        return self._ask_many("holds", len(keys), lambda: asked.holds(keys))

    def store(self, keys: Sequence[OffloadKey], views: Sequence[memoryview]) -> list[CallOutcome]:
        """Store blocks, in one call if the tier takes batches. ``False`` stands for a block that it declined."""
        batch = self._batch
        if batch is not None:
            outcomes = self._ask_many("store_many", len(keys), lambda: batch.store_many(keys, views))
        else:
            outcomes = [
                self.command("store", partial(self._tier.store, key, view)) or True
                for key, view in zip(keys, views, strict=True)
            ]
        return self._release("store", views, outcomes)

    def load(self, keys: Sequence[OffloadKey], views: Sequence[memoryview]) -> list[CallOutcome]:
        """Fill rows, in one call if the tier takes batches."""
        batch = self._batch
        if batch is not None:
            outcomes = self._ask_many("load_many", len(keys), lambda: batch.load_many(keys, views))
        else:
            outcomes = [
                self._ask_one("load", partial(self._tier.load, key, view))
                for key, view in zip(keys, views, strict=True)
            ]
        return self._release("load", views, outcomes)

    def read_again(
        self,
        keys: Sequence[OffloadKey],
        row_bytes: int,
        proves: Callable[[OffloadKey, memoryview], bool],
        is_over: Callable[[], bool],
    ) -> dict[OffloadKey, bool | None]:
        """Whether blocks are right when they are loaded once more, one by one; ``None`` where that can't be told.

        After a fault, or once all *is_over*, no other is loaded: each could take as long as a load may.
        """
        told: dict[OffloadKey, bool | None] = dict.fromkeys(keys)
        for key in keys:
            row = memoryview(bytearray(row_bytes))
            (outcome,) = [False] if is_over() else self.load([key], [row[:]])
            if isinstance(outcome, Fault):
                break
            told[key] = proves(key, row) if outcome is True else None
        return told

    def command(self, method: str, call: Callable[[], object]) -> Fault | None:
        """Make a call that answers nothing, such as that of ``delete``. Returns what went wrong."""
        return self._guarded(method, lambda: self._read_none(method, call()))

    def _ask_one(self, method: str, call: Callable[[], object]) -> CallOutcome:
        return self._guarded(method, lambda: self._read_bool(method, call()))

    def _ask_many(self, method: str, count: int, call: Callable[[], object]) -> list[CallOutcome]:
        answers = self._guarded(method, lambda: self._read_bools(method, count, call()))
        return [answers] * count if isinstance(answers, Fault) else answers

    def _guarded(self, method: str, work: Callable[[], _T]) -> _T | Fault:
        """Call the tier and read its answer. All that touches the answer has to happen in *work*."""
        try:
            return work()
        except BaseException as error:  # noqa: BLE001 - even SystemExit must not end an I/O thread and lose its job
            return self._raised(method, error)

    def _raised(self, method: str, error: BaseException) -> Fault:
        self._guard.debug(method, error)
        fault = self._fault(method, describe(error))
        return replace(fault, is_transient=isinstance(error, self._transient))

    def _fault(self, method: str, what: str) -> Fault:
        return Fault(f"tier {self._guard.identity.name!r}: {method}: {what}")

    # Inside the guard.

    def _read_none(self, method: str, answer: object) -> Fault | None:
        return None if answer is None else self._wrong(method, answer, "None, or an exception on a fault")

    def _read_bool(self, method: str, answer: object) -> CallOutcome:
        if type(answer) is bool:  # exactly: an object can claim to be an instance of anything
            return answer
        if isinstance(answer, Exception):
            return self._raised(method, answer)
        return self._wrong(method, answer, "a bool")

    def _read_bools(self, method: str, count: int, answer: object) -> list[CallOutcome] | Fault:
        if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
            return self._wrong(method, answer, "a sequence, one bool a key")
        answers = list(islice(answer, count + 1))  # its own length may be wrong, and its end may never come
        if len(answers) != count:
            found = f"more than {count}" if len(answers) > count else str(len(answers))
            return self._fault(method, f"returned {found} answers for {count} keys")
        return [one if type(one) is bool else self._read_bool(method, one) for one in answers]

    def _wrong(self, method: str, answer: object, expected: str) -> Fault:
        return self._fault(method, f"returned {type(answer).__name__}, expected {expected}")

    # After the call.

    def _release(
        self, method: str, views: Sequence[memoryview], outcomes: list[CallOutcome]
    ) -> list[CallOutcome]:
        for index, view in enumerate(views):
            try:
                view.release()
            except BufferError:
                outcomes[index] = self._fault(
                    method, "kept a reference to the block's buffer after it returned"
                )
        return outcomes


def interval_of(name: str, tier: SupportsFollow) -> float:
    """Seconds between two calls of ``follow``. Raises ``TierOpenError`` for what is no such number."""
    interval: object = tier.follow_interval
    if isinstance(interval, bool) or not isinstance(interval, int | float) or not interval > 0:
        raise TierOpenError(
            f"tier {name!r}: follow_interval must be a number of seconds above 0, not {text_of(interval)!r}"
        )
    return bounded(interval)
