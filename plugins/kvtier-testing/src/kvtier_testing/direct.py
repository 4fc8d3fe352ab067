"""A ``BlockTier`` without the core around it: calls one method at a time, and looks at what it answers."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from kvtier_core.blocktier import BlockTier
from kvtier_core.keys import OffloadKey
from kvtier_core.tier_settings import TierSettings
from kvtier_core.values import BlockInfo, TierContext
from kvtier_testing.calling import CallThread
from kvtier_testing.lent import LentRows
from kvtier_testing.raised import note_raised, told

_MANY = 100_000
"""Blocks that no test stores: what scan finds beyond is not looked at."""


class DirectTier:
    """One instance. A call that raises, hangs, or answers with what its method does not return fails the test."""

    def __init__(
        self,
        tier_class: type[BlockTier],
        settings: TierSettings,
        context: TierContext,
        rows: LentRows,
        patience_s: float,
    ) -> None:
        self._rows = rows
        self._row_bytes = context.row_bytes
        self._thread = CallThread(patience_s)
        self.tier: Any = self._thread.call("the constructor", partial(tier_class, settings, context))

    @property
    def hangs(self) -> bool:
        """Whether a call has not returned, so that none can follow."""
        return self._thread.hangs

    def call(self, method: str, *args: object, read: Callable[[Any], Any] | None = None) -> Any:  # noqa: ANN401 - a tier's answer
        """What *method* returns, as *read* reads it."""

        def tried() -> tuple[Exception | None, Any]:
            try:
                answer = getattr(self.tier, method)(*args)
                return None, answer if read is None else read(answer)
            except Exception as error:  # noqa: BLE001 - raised below, with the method's name
                return error, None

        error, answer = self._thread.call(method, tried)
        if error is not None:
            note_raised(error, type(self.tier))
            raise AssertionError(f"{method} raised {told(error)}") from error
        return answer

    def open(self) -> None:
        """Open it."""
        self.call("open")

    def close(self) -> None:
        """Close it."""
        self.call("close")

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Which of *keys* are stored."""
        return _bools("contains", self.call("contains", keys), len(keys))

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Which of *keys* need not be stored."""
        return _bools("holds", self.call("holds", keys), len(keys))

    def store(self, key: OffloadKey, row: bytes) -> None:
        """Store one block. Its row is another block's when this returns."""
        answer = self._with_rows("store", [key], [row], many=False)
        assert answer is None, f"store returned {answer!r}: it returns None, or raises"

    def store_many(self, keys: Sequence[OffloadKey], rows: Sequence[bytes]) -> list[bool]:
        """Store several blocks in one call."""
        return _bools("store_many", self._with_rows("store_many", keys, rows, many=True), len(keys))

    def load(self, key: OffloadKey) -> bytes | None:
        """One block, ``None`` where it is absent. Its row is another block's when this returns."""
        (row,) = intos = [bytearray(self._row_bytes)]
        found = self._with_rows("load", [key], intos, many=False, is_load=True)
        assert isinstance(found, bool), f"load returned {found!r}: it returns True or False, or raises"
        return bytes(row) if found else None

    def load_many(self, keys: Sequence[OffloadKey]) -> list[bytes | None]:
        """Several blocks in one call."""
        intos = [bytearray(self._row_bytes) for _ in keys]
        answer = self._with_rows("load_many", keys, intos, many=True, is_load=True)
        found = _bools("load_many", answer, len(keys))
        return [bytes(into) if is_there else None for into, is_there in zip(intos, found, strict=True)]

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Delete blocks."""
        answer = self.call("delete", keys)
        assert answer is None, f"delete returned {answer!r}: it returns None, or raises"

    def scan(self) -> list[BlockInfo]:
        """Every block."""
        blocks: list[Any] = self.call("scan", read=lambda found: list(islice(found, _MANY)))
        assert len(blocks) < _MANY, f"scan found {_MANY} blocks and did not end"
        strange = next((block for block in blocks if not isinstance(block, BlockInfo)), None)
        assert strange is None, f"scan found a {type(strange).__name__}: it yields BlockInfo"
        return blocks

    def _with_rows(
        self,
        method: str,
        keys: Sequence[OffloadKey],
        buffers: Sequence[bytes | bytearray],
        *,
        many: bool,
        is_load: bool = False,
    ) -> Any:  # noqa: ANN401 - a tier's answer
        rows = self._rows.lend([memoryview(buffer) for buffer in buffers], is_load=is_load)
        views = [self._rows.row(row) if is_load else self._rows.row(row).toreadonly() for row in rows]
        try:
            return self.call(method, *((keys, views) if many else (keys[0], views[0])))
        finally:
            if not self.hangs:  # a call that goes on may still use them
                self._rows.take_back(rows, f"a {method}")
                for view in views:
                    _release(method, view)


def _release(method: str, view: memoryview) -> None:
    try:
        view.release()
    except BufferError:
        raise AssertionError(
            f"{method} kept a reference to the block's buffer after it had returned"
        ) from None


def _bools(method: str, answer: Any, count: int) -> list[bool]:  # noqa: ANN401 - a tier's answer
    assert isinstance(answer, Sequence), (
        f"{method} returned {type(answer).__name__}: it returns a sequence, one bool a key"
    )
    for one in answer:
        what = told(one) if isinstance(one, Exception) else repr(one)
        assert isinstance(one, bool), f"{method} answered a key with {what}: it answers with True or False"
    assert len(answer) == count, f"{method} returned {len(answer)} answers for {count} keys"
    return list(answer)
