"""The disk tier's locks: they end with the process that took them, whatever it forked (K13, C32)."""

import errno
import os
import signal
import subprocess
import threading
from contextlib import contextmanager

import pytest

from kvtier_disk.extents.lock import LifeSign, exclusively, is_alive
from kvtier_disk.folder import Folder
from kvtier_testing.driving import PATIENCE_S
from tests.tiers.extents import A, B, direct, load, program, rows, store


@contextmanager
def child(work=lambda: None):
    """A forked process that does *work* and then lives until the block ends; its status has to be 0."""
    reading, writing = os.pipe()
    answer, answering = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(answering, b"x")
            os.close(writing)
            os.read(reading, 1)
        finally:
            os._exit(0)
    os.close(answering)
    try:
        assert os.read(answer, 1) == b"x", "the child failed"
        yield
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(answer)


def elsewhere(text: str, *arguments: object) -> str:
    """What a process of its own prints."""
    head = (
        "import pathlib, sys\nfrom kvtier_disk.extents.lock import exclusively, is_alive\n"
        "from kvtier_disk.folder import Folder\npath = pathlib.Path(sys.argv[1])\nfolder = Folder(path)\n"
    )
    out, err = program(head + text, *arguments).communicate(timeout=PATIENCE_S)
    assert err == ""
    return out


LOOK = "print(is_alive(folder, sys.argv[2]))\n"
TAKE = "with exclusively(folder, 5.0):\n    print('taken')\n"


def test_k13_a_fork_does_not_keep_the_root_locked(tmp_path):
    lock = Folder(tmp_path)
    with exclusively(lock, 1.0):
        forked = child()
        forked.__enter__()
    try:
        assert elsewhere(TAKE, tmp_path) == "taken\n"
    finally:
        forked.__exit__(None, None, None)


def test_k13_a_fork_may_lock_the_root_itself(tmp_path):
    lock = Folder(tmp_path)

    def work() -> None:
        with pytest.raises(OSError, match="too long"), exclusively(lock, 0.1):
            pass

    def work_afterwards() -> None:
        with exclusively(lock, PATIENCE_S):
            pass

    with exclusively(lock, 1.0), child(work):
        pass
    with child(work_afterwards):
        pass


def test_k13_threads_and_processes_take_turns(tmp_path):
    lock = Folder(tmp_path)
    failures: list[OSError] = []

    def try_it() -> None:
        try:
            with exclusively(lock, 0.1):
                raise AssertionError("two at once")
        except OSError as error:
            failures.append(error)

    with exclusively(lock, 1.0):
        for _ in range(2):  # one that gives up must not take the lock away
            thread = threading.Thread(target=try_it)
            thread.start()
            thread.join()
        out = elsewhere(
            "try:\n    with exclusively(folder, 0.1):\n        print('taken')\nexcept OSError:\n    print('kept out')",
            tmp_path,
        )
    assert out == "kept out\n"
    assert [failure.errno for failure in failures] == [errno.ETIMEDOUT] * 2
    assert elsewhere(TAKE, tmp_path) == "taken\n"


def test_c32_a_process_that_looks_at_its_own_sign_of_life_stays_alive(tmp_path):
    sign = LifeSign(Folder(tmp_path))
    assert is_alive(Folder(tmp_path), sign.name)
    assert elsewhere(LOOK, tmp_path, sign.name) == "True\n"
    sign.end()
    assert not is_alive(Folder(tmp_path), sign.name)


def test_k13_a_fork_that_closes_the_tier_leaves_the_parent_alive(tmp_path):
    tier = direct(tmp_path)
    store(tier, A)
    sign = tier._store.opened.member.life_sign
    with child(tier.close):
        assert elsewhere(LOOK, tmp_path / ".kvtier" / "alive", sign.name) == "True\n"
    assert store(tier, B) == [True]
    assert load(tier, A, B) == rows(A, B)
    tier.close()


def test_c32_k13_claims_of_a_killed_process_are_free_although_its_child_lives(tmp_path):
    text = (
        "import os, pathlib, signal, sys\n"
        "tier = t.direct(pathlib.Path(sys.argv[1]), capacity=4 * t.MIB)\n"
        "t.store(tier, t.A)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.pause()\n"
        "opened = tier._store.opened\n"
        "while opened.index.claim(opened.namespace, opened.owner, 1000):\n"
        "    pass\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    dead = program(text, tmp_path)
    kid = int(dead.stdout.readline())
    try:
        assert dead.wait(timeout=PATIENCE_S) == -signal.SIGKILL
        tier = direct(tmp_path, capacity=4 << 20)
        assert len(tier._store.opened.index.owners()) == 1
        assert load(tier, A) == rows(A)
        assert store(tier, B) == [True]
        tier.close()
    finally:
        os.kill(kid, signal.SIGKILL)
        dead.communicate(timeout=PATIENCE_S)


def test_k13_roots_open_beside_forks_at_any_moment(tmp_path):
    tier = direct(tmp_path)
    store(tier, A)
    tier.close()
    stop = threading.Event()

    def open_and_close() -> None:
        while not stop.is_set():
            direct(tmp_path).close()

    thread = threading.Thread(target=open_and_close)
    thread.start()
    children = [subprocess.Popen(["sleep", "60"], close_fds=False) for _ in range(3)]
    forks = []
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        forks.append(pid)
    stop.set()
    thread.join()
    try:
        opened = "tier = t.direct(path)\nprint(t.load(tier, t.A) == t.rows(t.A), t.store(tier, t.B))\ntier.close()\n"
        assert elsewhere(opened, tmp_path) == "True [True]\n"
    finally:
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for process in children:
            process.kill()
            process.wait()
