"""What is written in which order, and syncs that several threads share: nobody returns before its bytes are there."""

import errno
import os
import threading

import pytest

from kvtier_disk.extents.group_sync import GroupSync
from kvtier_testing.driving import PATIENCE_S
from tests.tiers.extents import KEYS, direct, store, wait_until


class Flush:
    """A flush that takes as long as the test wants."""

    def __init__(self) -> None:
        self.started, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.count = 0
        self.error: OSError | None = None

    def __call__(self) -> None:
        self.count += 1
        self.started.release()
        assert self.go_on.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error


def start(group: GroupSync, ended: list[object]) -> threading.Thread:
    def work() -> None:
        try:
            group.sync()
            ended.append(None)
        except OSError as error:
            ended.append(error.errno)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def wait_asked(group: GroupSync, count: int) -> None:
    wait_until(lambda: group._asked >= count, "they have asked")


def test_c32_who_comes_during_a_flush_shares_the_next_one():
    flush = Flush()
    ended: list[object] = []
    group = GroupSync(flush)
    first = start(group, ended)
    assert flush.started.acquire(timeout=PATIENCE_S)
    others = [start(group, ended) for _ in range(5)]
    wait_asked(group, 6)
    assert ended == []
    flush.go_on.release()
    first.join(PATIENCE_S)
    assert flush.started.acquire(timeout=PATIENCE_S)
    assert ended == [None]  # the others wrote after the first flush began
    flush.go_on.release()
    for thread in others:
        thread.join(PATIENCE_S)
    assert ended == [None] * 6
    assert flush.count == 2


def test_c33_a_failed_flush_fails_those_it_was_for_and_no_others():
    flush = Flush()
    ended: list[object] = []
    group = GroupSync(flush)
    first = start(group, ended)
    assert flush.started.acquire(timeout=PATIENCE_S)
    others = [start(group, ended) for _ in range(2)]
    wait_asked(group, 3)
    flush.error = OSError(errno.EIO, "bad")
    flush.go_on.release()
    first.join(PATIENCE_S)
    assert ended == [errno.EIO]
    flush.error = None
    flush.go_on.release()
    for thread in others:
        thread.join(PATIENCE_S)
    assert ended == [errno.EIO, None, None]
    flush.error = OSError(errno.ENOSPC, "full")
    flush.go_on.release()
    with pytest.raises(OSError, match="full"):
        group.sync()
    assert group._failed == {}


def test_c28_keys_are_written_after_their_rows_and_before_the_sync(tmp_path, monkeypatch):
    # A write of a few bytes through the page cache waits for all rows that are being written into the same file.
    calls: list[str] = []

    def note_calls_of(name: str) -> None:
        really = getattr(os, name)

        def call(*arguments):
            calls.append(name)
            return really(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "pwritev", "fdatasync"):
        note_calls_of(name)
    tier = direct(tmp_path)
    calls.clear()
    assert store(tier, *KEYS[:8]) == [True] * 8
    assert calls[-3:] == ["pwritev", "pwrite", "fdatasync"]
    tier.close()
