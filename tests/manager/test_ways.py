"""How many files and threads a block passes on its way: ``docs/ARCHITECTURE.md`` has the numbers."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType

import kvtier_core
from kvtier_core.coordinator.results import Finished
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking.work import Unit
from kvtier_core.values import JobResult, RequestInfo, TierJob
from kvtier_memory import MemoryTier
from kvtier_testing.rows import similar_keys
from tests.tiers.engine import TierEngine

ROOT = Path(kvtier_core.__file__).parent
PAGE = ROOT.parent / "docs" / "ARCHITECTURE.md"


def told(row: str) -> list[int]:
    """The numbers that the page has in a row of its table of ways."""
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row} |"))
    return [int(number) for number in re.findall(r"\| (\d+)\b", line)]


def file_of(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


@contextmanager
def watching(look: Callable[[FrameType], None]) -> Iterator[None]:
    """Have *look* see the frame of each call on every thread that begins meanwhile, and on this one."""

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            look(frame)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def mentions(value: object, key: OffloadKey) -> bool:
    """Whether *value*, an argument of a call, is about the job of *key*, or a part of it."""
    if isinstance(value, TierJob):
        return key in value.keys
    if isinstance(value, Unit):
        return value.key == key
    if isinstance(value, Finished | JobResult):
        return True  # no other job is under way
    return isinstance(value, list | tuple) and any(mentions(one, key) for one in value)


def arguments(frame: FrameType) -> list[object]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    return [frame.f_locals.get(name) for name in code.co_varnames[:count]]


def test_a_stored_block_passes_few_files_and_changes_threads_seldom():
    [key] = similar_keys(1)
    way: list[tuple[str, str]] = []
    lock = threading.Lock()

    def look(frame: FrameType) -> None:
        file = file_of(frame)
        if (
            file is not None
            and file.startswith("manager")
            and any(mentions(a, key) for a in arguments(frame))
        ):
            with lock:
                way.append((threading.current_thread().name, file))

    with watching(look), TierEngine(MemoryTier, threads=1) as engine:
        engine.store("a", [key])
    threads = [thread for thread, _ in way]
    changes = sum(one != other for one, other in pairwise(threads))
    files = {file for _, file in way}
    assert set(threads) == {"MainThread", "kvtier-seal", "kvtier-far-0"}
    assert [len(files), changes] == told("a stored block"), sorted(files)
    assert changes <= 4


def test_a_lookup_of_a_resident_set_passes_few_files_on_one_thread():
    keys = similar_keys(3)
    ways: list[list[str]] = []

    def look(frame: FrameType) -> None:
        if frame.f_code.co_name != "contains_many":
            return
        files: list[str] = []
        at: FrameType | None = frame
        while at is not None:
            file = file_of(at)
            if file is not None and file not in files:
                files.append(file)
            at = at.f_back
        ways.append([threading.current_thread().name, *files])

    with TierEngine(MemoryTier, threads=1) as engine:
        engine.store("a", keys[:2])
        engine.manager.new_request(RequestInfo(request_id="b"))
        engine.manager.lookup("b", [keys[2:]])  # takes in what has happened
        with watching(look):
            engine.manager.lookup("b", [keys[2:]])
        assert len(ways) == 1, "the tier's set is looked at once"
        thread, *files = ways[0]
        assert thread == "MainThread"
        assert [len(files), 0] == told("a lookup"), files
        assert len(files) <= 6
