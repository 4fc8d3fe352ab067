"""The processes of ``crash``: writers that are killed, and those that look at what they left.

Decides what a writer does and when it ends itself; whether what is left is right is decided in ``look``.
"""

import itertools
import json
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from kvtier_core.keys import OffloadKey
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.subjects import PATIENCE_S, Subject, fork, read_all

_KEYS = 24
_KEPT = 12  # the first so many of them are never deleted
_JOB_KEYS = 4
_TURNS = 12
_EARLIER = 2  # rounds before this one whose blocks are looked at too


def keys_of(number: int) -> list[OffloadKey]:
    """The keys that the writer of this round stores."""
    return similar_keys(_KEYS, seed=number)


# Writers.


def write(subject: Subject, number: int, tell: Callable[[bytes], None]) -> None:
    """Store, load and delete the round's blocks; *tell* a byte for each that is stored and stays."""
    keys = keys_of(number)
    rows = {key: subject.maker.make(key) for key in keys}
    with subject.open() as driver:
        for turn in range(_TURNS):
            jobs = []
            for begin in range(0, len(keys), _JOB_KEYS):
                batch = keys[begin : begin + _JOB_KEYS]
                jobs.append((batch, driver.start_store({key: rows[key] for key in batch})))
            buffers = [bytearray(subject.maker.row_bytes) for _ in keys]
            load = driver.start_load(keys, buffers)
            for batch, job in jobs:
                if driver.wait(job).error is None and turn == 0:
                    tell(bytes(index for key in batch if (index := keys.index(key)) < _KEPT))
            driver.wait(load)
            driver.discard(keys[_KEPT + turn % 2 :: 2])  # so that there is something to store


def _end_itself_at(line: int | None, code: str, lines: "itertools.count[int]") -> None:
    """Count the lines of the plugin's code that any thread executes from now on; be killed at the given one."""

    def trace(frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401 - as the interpreter has it
        if event == "call":
            return trace if frame.f_code.co_filename.startswith(code) else None
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def count_lines(subject: Subject) -> int:
    """How many lines of the plugin's code a writer executes that nobody kills."""

    def work(pipe: int) -> None:
        lines = itertools.count()
        _end_itself_at(None, subject.code, lines)
        write(subject, 0, lambda _: None)
        os.write(pipe, str(next(lines)).encode())

    child, pipe = fork(work)
    counted = read_all(pipe)
    os.waitpid(child, 0)
    return max(2, int(counted))


def kill_writer(subject: Subject, number: int, at_line: int | None, after_s: float) -> set[OffloadKey]:
    """Let a writer work until it is killed; the keys it was told are stored and did not delete."""

    def work(pipe: int) -> None:
        if at_line is not None:
            _end_itself_at(at_line, subject.code, itertools.count())
        write(subject, number, lambda told: _tell(pipe, told))

    child, pipe = fork(work)
    if at_line is None:
        time.sleep(after_s)  # a random moment is what is wanted
        os.kill(child, signal.SIGKILL)
        told = read_all(pipe)
    else:
        told = _wait_for_end(child, pipe)
    os.waitpid(child, 0)
    keys = keys_of(number)
    return {keys[index] for index in told}


def _tell(pipe: int, told: bytes) -> None:
    os.write(pipe, told)


def _wait_for_end(child: int, pipe: int) -> bytes:
    """Wait for a writer to be killed by itself, or to be done: it may need fewer lines than were counted."""
    told = b""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        ready = select.select([pipe], [], [], 0.05)[0]
        part = os.read(pipe, 1 << 16) if ready else b""
        told += part
        if ready and not part:
            break
    os.kill(child, signal.SIGKILL)
    os.close(pipe)
    return told


# What they left.


def look(subject: Subject, number: int, told: set[OffloadKey], *, torn_is_wrong: bool) -> Counter[str]:
    """Open the tier in a new process and look at the blocks of this round and those before it.

    With *torn_is_wrong* every row that comes back must be the one that was stored; else it may also be one that has no
    proof, which the core refuses.
    """
    child, pipe = fork(
        lambda out: _tell(
            out, json.dumps(_inspect(subject, number, told, torn_is_wrong=torn_is_wrong)).encode()
        )
    )
    answer = read_all(pipe)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return Counter(json.loads(answer)) if answer else Counter(failed_restarts=1)


def _inspect(subject: Subject, number: int, told: set[OffloadKey], *, torn_is_wrong: bool) -> dict[str, int]:
    seen: Counter[str] = Counter()
    with subject.open() as driver:
        for earlier in range(max(0, number - _EARLIER), number + 1):
            keys = keys_of(earlier)
            present = {key for key, there in zip(keys, driver.lookup(keys), strict=True) if there}
            loaded = driver.load(keys)
            seen["faults"] += len(loaded.result.failed)
            for key, row in loaded.rows.items():
                exact = row == subject.maker.make(key)
                torn = not exact and not torn_is_wrong and not subject.maker.proves(key, row)
                seen["exact_blocks" if exact else "refused_blocks" if torn else "wrong_bytes"] += 1
            if earlier == number:
                seen["acknowledged"] += len(told)
                seen["acknowledged_missing"] += len(told - (present & loaded.rows.keys()))
        seen["unstorable_keys"] += _unstorable(driver, subject.maker, keys_of(number))
    return dict(seen)


def _unstorable(driver: TierDriver, maker: RowMaker, keys: Sequence[OffloadKey]) -> int:
    """How many of these keys can't be stored, or don't come back."""
    rows = {key: maker.make(key) for key in keys}
    loaded = driver.load(keys).rows
    driver.discard([key for key, row in loaded.items() if row != rows[key]])
    driver.store({key: rows[key] for key in keys if loaded.get(key) != rows[key]})
    after = driver.load(keys).rows
    return sum(after.get(key) != rows[key] for key in keys)
