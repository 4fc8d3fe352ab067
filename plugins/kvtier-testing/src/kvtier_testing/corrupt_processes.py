"""The processes of ``corrupt``: engines that have the tier open while its files are damaged.

Decides what an engine does after each damage, and what counts: as in the core, a row is used only if it proves itself.
"""

import json
import logging
import os
import re
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kvtier_core.keys import OffloadKey
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.subjects import PATIENCE_S, Subject, fork

_KEYS = 32
_STIRRED = 5  # one of so many blocks is deleted and stored again after each damage
_STORABLE_WITHIN_S = 20.0
_POLL_S = 0.005
_LOOK, _END = b"l", b"e"
_VARIABLE = re.compile(r"'[^']*'|/\S+|\d+")


def keys_of(engine: int) -> list[OffloadKey]:
    """The keys of one engine: engines that share a tier don't delete each other's blocks."""
    return similar_keys(_KEYS, seed=engine)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one engine saw of its blocks after a damage."""

    refused: str = ""
    """Why the tier did not open."""
    exact: Sequence[int] = ()
    """The keys that came back right, by number."""
    wrong: int = 0
    """Rows that prove themselves and hold other bytes."""
    unproven: int = 0
    unstorable: int = 0
    """Keys that could not be stored and loaded again within 20 s."""
    warnings: Sequence[str] = ()
    """What the tier warned of since the last time, without names and numbers."""


class Engine:
    """A process that has the tier open. Its methods return ``None`` once it has ended by itself."""

    def __init__(self, subject: Subject, number: int) -> None:
        """Start it; the first ``look`` tells whether the tier opened."""
        orders, self._orders = os.pipe()

        def work(answers: int) -> None:
            os.close(self._orders)
            _serve(subject, keys_of(number), orders, answers)

        self._pid, answers = fork(work)
        os.close(orders)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self.status = 0
        """How the process ended, as ``os.waitpid`` gives it."""

    def look(self) -> Seen | None:
        """Let it load its blocks, say what came, and store all that is not there."""
        with suppress(BrokenPipeError):
            os.write(self._orders, _LOOK)
        line = b""
        give_up = time.monotonic() + PATIENCE_S
        while not line.endswith(b"\n"):
            if not select.select([self._answers], [], [], max(0.0, give_up - time.monotonic()))[0]:
                break
            part = self._answers.read(1 << 16)
            if not part:
                break
            line += part
        if line.endswith(b"\n"):
            return Seen(**json.loads(line))
        self.end(kill=True)
        return None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile the process does not run."""
        os.kill(self._pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            yield
        finally:
            os.kill(self._pid, signal.SIGCONT)

    def end(self, *, kill: bool) -> bool:
        """End it, by SIGKILL or by closing the tier; false when it had ended otherwise, or could not close. Once."""
        if kill:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            os.write(
                self._orders, _END
            )  # other engines have this end of the pipe too: closing it tells nothing
        os.close(self._orders)
        _, self.status = os.waitpid(self._pid, 0)
        self._answers.close()
        return self.status == (signal.SIGKILL if kill else 0)


# In the engine's process.


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(_VARIABLE.sub("#", record.getMessage())[:200])

    def take(self) -> list[str]:
        """Each once."""
        texts = list(dict.fromkeys(self._texts))
        self._texts.clear()
        return texts


def _serve(subject: Subject, keys: Sequence[OffloadKey], orders: int, answers: int) -> None:
    warnings = _Warnings()
    log = logging.getLogger("kvtier")
    log.handlers, log.propagate = [warnings], False

    def answer(**values: Any) -> None:
        os.write(answers, json.dumps({"warnings": warnings.take(), **values}).encode() + b"\n")

    try:
        driver = subject.open()
    except Exception as error:  # noqa: BLE001 - whatever it is, the tier is refused
        os.read(orders, 1)
        answer(refused=f"{type(error).__name__}: {error}")
        return
    with driver:
        while os.read(orders, 1) == _LOOK:
            answer(**_look(driver, subject.maker, keys))


def _look(driver: TierDriver, maker: RowMaker, keys: Sequence[OffloadKey]) -> dict[str, Any]:
    rows = {key: maker.make(key) for key in keys}
    loaded = _load(driver, maker, keys)
    exact = [number for number, key in enumerate(keys) if loaded.rows.get(key) == rows[key]]
    wrong = sum(row != rows[key] for key, row in loaded.rows.items())
    driver.discard(keys[::_STIRRED])
    missing = [key for key in keys if loaded.rows.get(key) != rows[key] or key in keys[::_STIRRED]]
    give_up = time.monotonic() + _STORABLE_WITHIN_S
    unproven = loaded.unproven
    while True:
        driver.store({key: rows[key] for key in missing})
        again = _load(driver, maker, missing)
        unproven += again.unproven
        wrong += sum(row != rows[key] for key, row in again.rows.items())
        missing = [key for key in missing if again.rows.get(key) != rows[key]]
        if not missing or time.monotonic() > give_up:
            break
        time.sleep(_POLL_S)
    return {"exact": exact, "wrong": wrong, "unproven": unproven, "unstorable": len(missing)}


@dataclass(frozen=True)
class _Proven:
    rows: dict[OffloadKey, bytes]
    unproven: int


def _load(driver: TierDriver, maker: RowMaker, keys: Sequence[OffloadKey]) -> _Proven:
    """The rows that prove themselves; the others are discarded, as the core does."""
    loaded = driver.load(keys).rows
    proven = {key: row for key, row in loaded.items() if maker.proves(key, row)}
    unproven = [key for key in loaded if key not in proven]
    if unproven:
        driver.discard(unproven)
    return _Proven(proven, len(unproven))
