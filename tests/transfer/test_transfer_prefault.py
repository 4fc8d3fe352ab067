import resource

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
