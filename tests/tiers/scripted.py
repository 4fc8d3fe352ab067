"""A blocking tier that does what a test tells it, and notices calls that should never happen together."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from kvtier_core.blocktier import BlockTier
from kvtier_core.keys import OffloadKey
from kvtier_core.values import BlockInfo, TierContext, TierInfo
from kvtier_testing.driving import PATIENCE_S, TierDriver

ROW = 4096

Before = Callable[[str, Sequence[OffloadKey]], object]


class Script:
    """What the tier's instances share with the test.

    ``before(method, keys)`` runs inside each call: it may raise, wait, or return what the call shall return instead
    of doing its work (``None`` lets it work).
    """

    def __init__(self) -> None:
        self.before: Before = lambda _method, _keys: None
        self.lock = threading.Lock()
        self.contexts: list[TierContext] = []
        self.stores: list[dict[OffloadKey, bytes]] = []  # of each instance, in order of their making
        self.times: dict[OffloadKey, float] = {}
        self.calls: list[tuple[str, tuple[OffloadKey, ...]]] = []
        self.closed: list[int] = []  # instances, in order of their closing
        self.most_blocks = 0
        self.violations: list[str] = []
        self._busy: dict[int, set[OffloadKey]] = {}

    @property
    def blocks(self) -> dict[OffloadKey, bytes]:
        """What the latest instance holds."""
        return self.stores[-1]

    def count(self, method: str) -> int:
        """How many calls of *method* there were."""
        with self.lock:
            return sum(name == method for name, _ in self.calls)

    def enter(self, instance: int, method: str, keys: Sequence[OffloadKey]) -> None:
        with self.lock:
            self.calls.append((method, tuple(keys)))
            busy = self._busy.setdefault(instance, set())
            if not busy.isdisjoint(keys):
                self.violations.append(f"{method} while another call on one of its keys runs")
            if method == "close" and busy:
                self.violations.append("close while a call runs")
            if instance in self.closed and method != "close":
                self.violations.append(f"{method} after close")
            busy.update(keys)

    def leave(self, instance: int, keys: Sequence[OffloadKey]) -> None:
        with self.lock:
            self._busy[instance].difference_update(keys)
            self.most_blocks = max(self.most_blocks, len(self.stores[instance]))


class ScriptedTier(BlockTier):
    """A dict behind a ``Script``; subclasses made by ``scripted`` carry the script."""

    info = TierInfo(medium="memory")
    script: Script
    seed: dict[OffloadKey, bytes]

    def __init__(self, settings: Any, context: TierContext) -> None:
        super().__init__(settings, context)
        self.number = len(self.script.stores)
        self.script.contexts.append(context)
        self.script.stores.append(dict(self.seed))
        self._call("init", (), lambda: None)

    def _call(self, method: str, keys: Sequence[OffloadKey], work: Callable[[], object]) -> Any:
        self.script.enter(self.number, method, keys)
        try:
            instead = self.script.before(method, keys)
            return work() if instead is None else instead
        finally:
            self.script.leave(self.number, keys)

    @property
    def _blocks(self) -> dict[OffloadKey, bytes]:
        return self.script.stores[self.number]

    def open(self) -> None:
        self._call("open", (), lambda: None)

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        answer: Sequence[bool] = self._call("contains", keys, lambda: [key in self._blocks for key in keys])
        return answer

    def store(self, key: OffloadKey, block: memoryview) -> None:
        # What a script returns instead is passed on: the adapter is to refuse it.
        return self._call("store", [key], lambda: self._blocks.__setitem__(key, bytes(block)))

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        def work() -> bool:
            if key not in self._blocks:
                return False
            into[:] = self._blocks[key]
            return True

        answer: bool = self._call("load", [key], work)
        return answer

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        def work() -> None:
            for key in keys:
                self._blocks.pop(key, None)

        return self._call("delete", keys, work)

    def close(self) -> None:
        try:
            return self._call("close", (), lambda: None)
        finally:
            self.script.closed.append(self.number)


class ScanningTier(ScriptedTier):
    """The same with ``scan``."""

    def scan(self) -> Iterable[BlockInfo]:
        found: Iterable[BlockInfo] = self._call(
            "scan",
            (),
            lambda: [
                BlockInfo(key=key, bytes=len(block), time=self.script.times.setdefault(key, time.time()))
                for key, block in self._blocks.items()
            ],
        )
        return found


class BatchTier(ScriptedTier):
    """The same with batches."""

    def store_many(
        self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        def work() -> list[bool]:
            self._blocks.update((key, bytes(block)) for key, block in zip(keys, blocks, strict=True))
            return [True] * len(keys)

        answer: Sequence[bool | Exception] = self._call("store_many", keys, work)
        return answer

    def load_many(
        self, keys: Sequence[OffloadKey], intos: Sequence[memoryview]
    ) -> Sequence[bool | Exception]:
        def work() -> list[bool]:
            for key, into in zip(keys, intos, strict=True):
                if key in self._blocks:
                    into[:] = self._blocks[key]
            return [key in self._blocks for key in keys]

        answer: Sequence[bool | Exception] = self._call("load_many", keys, work)
        return answer


def drive(
    script: Script,
    base: type[ScriptedTier] = ScriptedTier,
    *,
    info: TierInfo = ScriptedTier.info,
    seed: dict[OffloadKey, bytes] | None = None,
    capacity_blocks: int | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    **settings: object,
) -> TierDriver:
    """Open a scripted tier through the adapter. *seed* is what every instance holds when it is made."""
    tier_class = type("Scripted", (base,), {"script": script, "seed": seed or {}, "info": info})
    return TierDriver(
        tier_class,
        base.Settings.model_validate({"type": "scripted", **settings}),
        row_bytes=ROW,
        capacity_bytes=None if capacity_blocks is None else capacity_blocks * ROW,
        name="scripted",
        monotonic=monotonic,
        wall=wall,
    )


class Gate:
    """Holds calls up: as ``script.before``, it lets those of *method* wait until it is opened, or its block ends."""

    def __init__(self, *methods: str, keys: Iterable[OffloadKey] | None = None) -> None:
        self._methods = methods
        self._keys = None if keys is None else frozenset(keys)
        self._open = threading.Event()
        self._entered = threading.Semaphore(0)

    def __call__(self, method: str, keys: Sequence[OffloadKey]) -> None:
        if method in self._methods and (self._keys is None or not self._keys.isdisjoint(keys)):
            self._entered.release()
            assert self._open.wait(PATIENCE_S), "nobody opened the gate"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.open()

    def wait_entered(self, calls: int = 1) -> None:
        """Wait until so many more calls wait at the gate."""
        for _ in range(calls):
            assert self._entered.acquire(timeout=PATIENCE_S), "no call came to the gate"

    def open(self) -> None:
        """Let all through, now and later."""
        self._open.set()


def row(number: int) -> bytes:
    """A row that is told from others by its number."""
    return number.to_bytes(4, "big") * (ROW // 4)


def fail(error: BaseException) -> object:
    """Raise, where only an expression fits."""
    raise error


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
