"""The one place where a blocking tier's methods are called, and where whatever they do wrong is caught (C30).

Every call ends as one outcome a key: ``True`` (stored, filled, there), ``False`` (absent) or a ``Fault``. Nothing
a tier raises or returns passes this module in any other form. Holds no state and decides nothing about keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier_core.blocktier import BlockTier, SupportsBatch
from kvtier_core.keys import OffloadKey
from kvtier_core.masking import mask_text

_MAX_TEXT = 500  # characters of a tier's message that are passed on


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a key could not be served, in words."""

    text: str


Outcome = bool | Fault


def describe(error: BaseException) -> str:
    """The type and message of *error*, cut to a bearable length, without what looks like a secret in a URL."""
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - a tier's own exception class may be broken too
        text = f"(its message could not be read: {type(broken).__name__})"
    text = mask_text(text)
    text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class TierCalls:
    """Calls one tier; safe from any thread as far as the tier is.

    Buffers are handed over as views of our own, released after the call: a tier that kept one gets an error instead
    of a row that belongs to another block meanwhile. (An array it made over the view can't be taken back.)
    """

    def __init__(self, name: str, tier: BlockTier) -> None:
        self._name = name
        self._tier = tier
        self._batch = tier if isinstance(tier, SupportsBatch) else None

    @property
    def batches(self) -> bool:
        """Whether ``store`` and ``load`` move several blocks in one call."""
        return self._batch is not None

    def contains(self, keys: Sequence[OffloadKey]) -> list[Outcome]:
        """Ask which keys are stored; one call."""
        return self._per_key("contains", len(keys), self._try("contains", self._tier.contains, keys))

    def store(self, keys: Sequence[OffloadKey], buffers: Sequence[memoryview]) -> list[Outcome]:
        """Store blocks, in one call if the tier takes batches; an outcome is ``True`` or a fault."""
        views = [buffer.toreadonly() for buffer in buffers]
        if self._batch is not None:
            answer = self._try("store_many", self._batch.store_many, keys, views)
            outcomes = self._per_key("store_many", len(keys), answer)
        else:
            outcomes = [
                self._expect_none("store", self._try("store", self._tier.store, key, view))
                for key, view in zip(keys, views, strict=True)
            ]
        refused = self._fault("store_many", "returned False for a block it was to store")
        return self._release("store", views, [refused if done is False else done for done in outcomes])

    def load(self, keys: Sequence[OffloadKey], buffers: Sequence[memoryview]) -> list[Outcome]:
        """Fill buffers, in one call if the tier takes batches."""
        views = [buffer[:] for buffer in buffers]
        if self._batch is not None:
            answer = self._try("load_many", self._batch.load_many, keys, views)
            outcomes = self._per_key("load_many", len(keys), answer)
        else:
            outcomes = [
                self._expect_bool("load", self._try("load", self._tier.load, key, view))
                for key, view in zip(keys, views, strict=True)
            ]
        return self._release("load", views, outcomes)

    def delete(self, keys: Sequence[OffloadKey]) -> Fault | None:
        """Delete blocks; one call. Returns what went wrong."""
        done = self._expect_none("delete", self._try("delete", self._tier.delete, keys))
        return done if isinstance(done, Fault) else None

    def close(self) -> Fault | None:
        """Close the tier. Returns what went wrong."""
        done = self._expect_none("close", self._try("close", self._tier.close))
        return done if isinstance(done, Fault) else None

    def _try(self, method: str, call: Callable[..., object], *args: object) -> object:
        try:
            return call(*args)
        except BaseException as error:  # noqa: BLE001 - even SystemExit must not end an I/O thread and lose its job
            return self._fault(method, describe(error))

    def _fault(self, method: str, what: str) -> Fault:
        return Fault(f"tier {self._name!r}: {method}: {what}")

    def _expect_none(self, method: str, answer: object) -> Outcome:
        if answer is None:
            return True
        return (
            answer
            if isinstance(answer, Fault)
            else self._wrong(method, answer, "None, or an exception on a fault")
        )

    def _expect_bool(self, method: str, answer: object) -> Outcome:
        if isinstance(answer, bool | Fault):
            return answer
        if isinstance(answer, Exception):
            return self._fault(method, describe(answer))
        return self._wrong(method, answer, "a bool")

    def _per_key(self, method: str, count: int, answer: object) -> list[Outcome]:
        if isinstance(answer, Fault):
            return [answer] * count
        if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
            return [self._wrong(method, answer, "a sequence, one bool a key")] * count
        if len(answer) != count:
            return [self._fault(method, f"returned {len(answer)} answers for {count} keys")] * count
        return [self._expect_bool(method, one) for one in answer]

    def _wrong(self, method: str, answer: object, expected: str) -> Fault:
        return self._fault(method, f"returned {type(answer).__name__}, expected {expected}")

    def _release(self, method: str, views: Sequence[memoryview], outcomes: list[Outcome]) -> list[Outcome]:
        for index, view in enumerate(views):
            try:
                view.release()
            except BufferError:
                outcomes[index] = self._fault(
                    method, "kept a reference to the block's buffer after it returned"
                )
        return outcomes
