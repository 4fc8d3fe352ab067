"""Run as a program: what several processes do to one fsspec tier.

``python fsspec_program.py TASK URL OPTIONS_AS_JSON``, where TASK is

- ``fork``: store in this process, fork, use the tier in the child and then in this process;
- ``share``: many processes store the same keys, in different order, where locks do nothing;
- ``kill``: processes that store for ever are killed with SIGKILL, and what they left is looked at.

Exit status 0 when every check held; the reason is on stderr otherwise.
"""

import fcntl
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierContext
from kvtier_fsspec import FsspecTier
from kvtier_testing.rows import RowMaker, similar_keys

MAKER = RowMaker("shared", 100_000)
KEYS = similar_keys(50)
CHILD_S = 10.0


def open_tier(url: str, options: dict[str, Any]) -> FsspecTier:
    settings = FsspecTier.Settings.model_validate({"type": "fsspec", "url": url, "storage_options": options})
    tier = FsspecTier(settings, TierContext(name="t", namespace="shared", row_bytes=MAKER.row_bytes))
    tier.open()
    return tier


def store(tier: FsspecTier, key: OffloadKey) -> None:
    tier.store(key, memoryview(MAKER.make(key)))


def load(tier: FsspecTier, key: OffloadKey) -> bytes | None:
    into = bytearray(MAKER.row_bytes)
    return bytes(into) if tier.load(key, memoryview(into)) else None


def check(fact: object, what: object) -> None:
    if not fact:
        raise RuntimeError(what)


def in_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the child must not return into the parent's code
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return child


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork(url: str, options: dict[str, Any]) -> None:
    tier = open_tier(url, options)
    store(tier, KEYS[0])

    def child() -> None:
        signal.alarm(int(CHILD_S))  # a hang is death by SIGALRM
        check(tier.contains(KEYS[:2]) == [True, False], "lookup in the child")
        check(load(tier, KEYS[0]) == MAKER.make(KEYS[0]), "load in the child")
        store(tier, KEYS[1])
        check(load(tier, KEYS[1]) == MAKER.make(KEYS[1]), "load of what the child stored")
        tier.close()

    status = wait(in_child(child))
    check(status == 0, f"the child ended with {status}")
    check(load(tier, KEYS[0]) == MAKER.make(KEYS[0]), "load in the parent")
    if not url.startswith("memory:"):
        check(tier.contains(KEYS[:3]) == [True, True, False], "lookup in the parent")
    tier.close()


def share(url: str, options: dict[str, Any]) -> None:
    fcntl.flock = lambda *_args: None  # what some network file systems do

    def work(number: int) -> None:
        tier = open_tier(url, options)
        for key in random.Random(number).sample(KEYS, len(KEYS)):
            store(tier, key)

    children = [in_child(partial(work, number)) for number in range(8)]
    check({wait(child) for child in children} == {0}, "a writer failed")
    tier = open_tier(url, options)
    check(all(load(tier, key) == MAKER.make(key) for key in KEYS), "wrong bytes")
    check(sorted(block.key for block in tier.scan()) == KEYS, "scan")


def kill(url: str, options: dict[str, Any]) -> None:
    rng = random.Random(0)
    found = missing = 0
    for number in range(20):
        keys = similar_keys(20, seed=number)
        kill_a_writer(url, options, keys, rng.uniform(0.0, 0.01))
        tier = open_tier(url, options)
        scanned = {block.key for block in tier.scan()}
        for key in keys:
            row = load(tier, key)
            check(row in (None, MAKER.make(key)), "wrong bytes")
            check(
                (row is not None) == (key in scanned) == tier.contains([key])[0],
                "scan, lookup and load differ",
            )
            found, missing = found + (row is not None), missing + (row is None)
            store(tier, key)
            check(load(tier, key) == MAKER.make(key), "not storable")
    check(min(found, missing) > 0, f"no kill hit a writer at work: {found} found, {missing} missing")


def kill_a_writer(url: str, options: dict[str, Any], keys: list[OffloadKey], after_s: float) -> None:
    reading, writing = os.pipe()

    def child() -> None:
        tier = open_tier(url, options)

        def work(mine: list[OffloadKey]) -> None:
            while True:
                for key in mine:
                    store(tier, key)

        for number in range(3):
            threading.Thread(target=work, args=(keys[number::3],), daemon=True).start()
        os.write(writing, b"x")
        signal.pause()

    pid = in_child(child)
    os.close(writing)
    check(os.read(reading, 1) == b"x", "the writer did not start")
    os.close(reading)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    wait(pid)


if __name__ == "__main__":
    {"fork": fork, "share": share, "kill": kill}[sys.argv[1]](sys.argv[2], json.loads(sys.argv[3]))
