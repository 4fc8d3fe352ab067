"""Whoever comes first makes the pool; the others get it from there, in any order, and nothing is left."""

import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from kvtier_core import PoolError
from kvtier_core.transfer import PoolGeometry
from kvtier_vllm.meeting import meet_as_scheduler, meet_as_worker

GEOMETRY = PoolGeometry(num_rows=4, row_bytes=4096, num_workers=2)
ONE = PoolGeometry(num_rows=4, row_bytes=4096, num_workers=1)
PATIENCE_S = 60.0


@pytest.fixture
def engine_id():
    return str(uuid.uuid4())


def test_c43_workers_and_scheduler_see_the_same_rows(engine_id):
    first = meet_as_worker(engine_id, 1, GEOMETRY, b"facts", PATIENCE_S)
    second = meet_as_worker(engine_id, 0, GEOMETRY, b"facts", PATIENCE_S)
    scheduler = meet_as_scheduler(engine_id, PATIENCE_S)
    first.pool.row(2)[:5] = b"hello"
    assert bytes(second.pool.row(2)[:5]) == bytes(scheduler.pool.row(2)[:5]) == b"hello"
    assert scheduler.facts == b"facts"
    assert scheduler.pool.geometry == GEOMETRY
    for admission in (first, second, scheduler):
        assert admission.pool.close()


def test_c43_the_scheduler_may_come_first(engine_id):
    found = []
    thread = threading.Thread(target=lambda: found.append(meet_as_scheduler(engine_id, PATIENCE_S)))
    thread.start()
    worker = meet_as_worker(engine_id, 0, ONE, b"facts", PATIENCE_S)
    thread.join(PATIENCE_S)
    worker.pool.row(0)[:2] = b"hi"
    assert bytes(found[0].pool.row(0)[:2]) == b"hi"
    assert worker.pool.close()
    assert found[0].pool.close()


def test_c43_without_a_worker_on_this_host_the_scheduler_says_so(engine_id):
    with pytest.raises(PoolError, match="other hosts"):
        meet_as_scheduler(engine_id, 0.2)


def test_k1_a_worker_with_other_facts_is_refused(engine_id):
    with meet_as_worker(engine_id, 0, GEOMETRY, b"facts", PATIENCE_S).pool:
        with pytest.raises(PoolError, match="other facts"):
            meet_as_worker(engine_id, 1, GEOMETRY, b"others", PATIENCE_S)
        meet_as_worker(engine_id, 1, GEOMETRY, b"facts", PATIENCE_S).pool.close()
        meet_as_scheduler(engine_id, PATIENCE_S).pool.close()


def test_k13_two_engines_with_one_id_do_not_share_a_pool(engine_id):
    with meet_as_worker(engine_id, 0, GEOMETRY, b"facts", PATIENCE_S).pool:
        with pytest.raises(PoolError, match="two engines"):
            meet_as_worker(engine_id, 0, GEOMETRY, b"facts", PATIENCE_S)
        meet_as_worker(engine_id, 1, GEOMETRY, b"facts", PATIENCE_S).pool.close()
        meet_as_scheduler(engine_id, PATIENCE_S).pool.close()


def test_when_all_have_come_the_name_is_free_again(engine_id):
    for message in (b"one", b"two"):
        worker = meet_as_worker(engine_id, 0, ONE, message, PATIENCE_S)
        scheduler = meet_as_scheduler(engine_id, PATIENCE_S)
        assert scheduler.facts == message
        assert _thread_ended()
        assert worker.pool.close()
        assert scheduler.pool.close()


def _thread_ended():
    for thread in threading.enumerate():
        if thread.name == "kvtier-meeting":
            thread.join(PATIENCE_S)
    return True


def test_a_pool_that_does_not_fit_is_told_and_leaves_the_name_free(engine_id):
    huge = PoolGeometry(num_rows=1 << 40, row_bytes=4096)
    for _ in range(2):
        with pytest.raises(PoolError, match="does not fit"):
            meet_as_worker(engine_id, 0, huge, b"facts", PATIENCE_S)


def test_c32_a_host_that_is_killed_leaves_nothing(engine_id):
    program = (
        "import sys\n"
        "from kvtier_core.transfer import PoolGeometry\n"
        "from kvtier_vllm.meeting import meet_as_worker\n"
        f"pool = meet_as_worker({engine_id!r}, 0, PoolGeometry(num_rows=4, row_bytes=4096), b'old', 60.0).pool\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as old:
        assert old.stdout.readline() == "up\n"
        old.kill()
        old.wait(PATIENCE_S)
    worker = meet_as_worker(engine_id, 0, ONE, b"new", PATIENCE_S)
    scheduler = meet_as_scheduler(engine_id, PATIENCE_S)
    assert scheduler.facts == b"new"
    assert worker.pool.close()
    assert scheduler.pool.close()
    assert not [name for name in Path("/dev/shm").iterdir() if "kvtier" in name.name]
