import ctypes
import gc
import os
import resource
import threading

from kvtier_core.transfer import prefault
from kvtier_core.transfer.pool import Pool, PoolGeometry

GEOMETRY = PoolGeometry(num_rows=64, row_bytes=1 << 20)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_prefaulted_rows_are_written_without_page_faults_and_keep_what_they_held():
    with Pool.create(GEOMETRY) as pool:
        pool.row(3)[:4] = b"held"
        assert pool.prefault().wait(30)
        assert bytes(pool.row(3)[:4]) == b"held"
        before = faults()
        pool.rows_array[:, ::4096] = 1
        assert faults() - before < GEOMETRY.num_rows * 256 / 10  # of 16,384 pages


def test_close_ends_a_pass_that_is_under_way():
    pool = Pool.create(GEOMETRY)
    running = pool.prefault()
    assert pool.prefault() is running
    assert pool.close()
    assert running.wait(0)


def test_a_pass_keeps_the_mapping_of_a_pool_that_nobody_has_any_more(monkeypatch):
    begun, go_on, touched = threading.Event(), threading.Event(), []

    def advise(address, length, _advice):
        begun.set()
        assert go_on.wait(30)
        touched.append(ctypes.string_at(address, 7))

    monkeypatch.setattr(prefault, "advise", advise)
    pool = Pool.create(GEOMETRY)
    running = pool.prefault()
    assert begun.wait(30)
    del pool
    gc.collect()
    go_on.set()
    assert running.wait(30)
    assert touched[0] == b"kvtpool"
    assert len(touched) == -(-GEOMETRY.total_bytes // (16 << 20))


def test_a_pass_runs_on_the_processors_that_it_is_given(monkeypatch):
    before, seen = os.sched_getaffinity(0), []
    monkeypatch.setattr(prefault, "advise", lambda *_: seen.append(os.sched_getaffinity(0)))
    with Pool.create(GEOMETRY) as pool:
        assert pool.prefault(frozenset([min(before)])).wait(30)
    assert set(map(frozenset, seen)) == {frozenset([min(before)])}
    assert os.sched_getaffinity(0) == before


def test_a_pass_whose_processors_have_gone_runs_all_the_same(monkeypatch):
    seen = []
    monkeypatch.setattr(prefault, "advise", lambda *_: seen.append(1))
    with Pool.create(GEOMETRY) as pool:
        assert pool.prefault(frozenset([100_000])).wait(30)
    assert seen
