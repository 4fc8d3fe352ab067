"""Worker 0 makes the pool; the scheduler learns from it what it can't know."""

import threading
import uuid
from dataclasses import replace

import pytest

from kvtier_core import PoolError
from kvtier_core.transfer import PoolGeometry
from kvtier_core.transfer.prefault import MADV_POPULATE_WRITE, advise, map_for_huge_pages
from kvtier_vllm.sharing import open_as_scheduler, open_as_worker
from tests.transfer.conftest import missing
from tests.transfer.test_huge_pages import huge_bytes
from tests.vllm.facts_of import PLAIN

TWO = PoolGeometry(num_rows=4, row_bytes=4096, num_workers=2)
ONE = PoolGeometry(num_rows=4, row_bytes=4096)
PATIENCE_S = 60.0


@pytest.fixture
def engine_id():
    return f"{uuid.uuid4()} with a name that is no file's"


def worker(engine_id, rank=0, geometry=ONE, facts=PLAIN):
    return open_as_worker(engine_id, rank, geometry, facts, PATIENCE_S, huge_pages=False)


def scheduler_of(engine_id, timeout_s):
    return open_as_scheduler(engine_id, timeout_s, huge_pages=False)


def test_c43_workers_and_scheduler_share_rows_and_facts(engine_id):
    with (
        worker(engine_id, 0, TWO) as first,
        worker(engine_id, 1, TWO) as second,
    ):
        scheduler, facts = scheduler_of(engine_id, PATIENCE_S)
        with scheduler:
            assert facts == PLAIN
            assert scheduler.geometry == TWO
            first.row(2)[:5] = b"hello"
            assert bytes(second.row(2)[:5]) == bytes(scheduler.row(2)[:5]) == b"hello"
            assert not missing(scheduler)


def test_c43_the_scheduler_may_come_first(engine_id):
    found = []
    thread = threading.Thread(target=lambda: found.append(scheduler_of(engine_id, PATIENCE_S)))
    thread.start()
    with worker(engine_id) as pool:
        thread.join(PATIENCE_S)
        pool.row(0)[:2] = b"hi"
        with found[0][0] as scheduler:
            assert bytes(scheduler.row(0)[:2]) == b"hi"


def test_c43_without_a_worker_on_this_host_the_scheduler_says_so(engine_id):
    with pytest.raises(PoolError, match="other hosts"):
        scheduler_of(engine_id, 0.2)


def test_c43_a_worker_that_is_elsewhere_is_missed_and_its_engine_refused(engine_id):
    """As on another host: nothing else tells, with Ray not even vLLM."""
    with (
        worker(engine_id, 0, TWO),
        pytest.raises(PoolError, match="worker 1 did not join the pool within .* on this machine"),
    ):
        scheduler_of(engine_id, 0.2)


def test_c43_without_worker_0_every_other_process_of_the_engine_says_so(engine_id):
    with pytest.raises(PoolError, match="worker 0, which is to make it, did not start, .* another machine"):
        open_as_worker(engine_id, 1, TWO, PLAIN, 0.2, huge_pages=False)


def test_c43_a_worker_that_is_late_is_waited_for(engine_id):
    found = []
    thread = threading.Thread(target=lambda: found.append(scheduler_of(engine_id, PATIENCE_S)))
    with worker(engine_id, 0, TWO):
        thread.start()
        thread.join(0.1)
        assert not found
        with worker(engine_id, 1, TWO):
            thread.join(PATIENCE_S)
            ((scheduler, _),) = found
            with scheduler:
                assert not missing(scheduler)


def test_k1_a_worker_with_other_facts_is_refused(engine_id):
    with (
        worker(engine_id, 0, TWO),
        pytest.raises(PoolError, match="other facts"),
    ):
        worker(engine_id, 1, TWO, replace(PLAIN, config_digest="other"))


def test_k13_two_engines_with_one_id_do_not_share_a_pool(engine_id):
    with (
        worker(engine_id, 0, TWO),
        pytest.raises(PoolError, match="worker 0 of this pool is already there"),
    ):
        worker(engine_id, 0, TWO)


def test_a_pool_that_does_not_fit_is_told(engine_id):
    with pytest.raises(PoolError, match="does not fit"):
        worker(engine_id, geometry=PoolGeometry(num_rows=1 << 40, row_bytes=4096))


def test_the_scheduler_takes_the_pool_in_huge_pages_as_the_workers_do(engine_id):
    """One that took small pages would undo the workers' work: both passes run at once, over the same memory."""
    geometry = PoolGeometry(num_rows=8, row_bytes=1 << 20)
    with open_as_worker(engine_id, 0, geometry, PLAIN, PATIENCE_S, huge_pages=True):
        scheduler, _ = open_as_scheduler(engine_id, PATIENCE_S, huge_pages=True)
        with scheduler:
            assert scheduler.prefault().wait(PATIENCE_S)
            pages = map_for_huge_pages(scheduler.fd, 8 << 20)
            if pages is None:
                pytest.skip("this kernel has no huge pages")
            advise(pages.address, 8 << 20, MADV_POPULATE_WRITE)
            huge = huge_bytes(pages.address)
            pages.take(0, 8 << 20)
            if pages.finish():
                pytest.skip("this kernel does not collapse shared memory")
            assert huge == 8 << 20
