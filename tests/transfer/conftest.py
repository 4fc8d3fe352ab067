"""Pools that are always closed, and devices that are always shut down."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from kvtier_core.transfer import KVLayout, Pool, PoolGeometry

if TYPE_CHECKING:
    from kvtier_core.transfer import CPUDevice
    from tests.transfer.simgpu.gpu import GPU

TIMEOUT_S = 60.0
"""Far above anything measured: a test that runs into it is wrong, not slow."""

MakePool = Callable[..., Pool]
MakeDevice = Callable[..., "CPUDevice"]


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    """Make pools; every one must be closable, mapping and all, at the end."""
    pools: list[Pool] = []

    def make(*, num_rows: int = 8, row_bytes: int = 8192, num_workers: int = 1) -> Pool:
        geometry = PoolGeometry(num_rows=num_rows, row_bytes=row_bytes, num_workers=num_workers)
        pools.append(Pool.create(geometry))
        return pools[-1]

    yield make
    for pool in pools:
        assert pool.close(), "something still holds rows of the pool"


@pytest.fixture
def make_device(make_pool: MakePool) -> Iterator[MakeDevice]:
    """Make CPU devices that are shut down before their pools close."""
    from kvtier_core.transfer import CPUDevice  # here, so that the pool's tests need no torch

    devices: list[CPUDevice] = []

    def make(
        layout: KVLayout, pool: Pool, worker: int = 0, on_finished: Callable[[], None] | None = None
    ) -> CPUDevice:
        devices.append(CPUDevice(layout, pool, worker, on_finished))
        return devices[-1]

    yield make
    for device in devices:
        assert device.shutdown(TIMEOUT_S)


@pytest.fixture
def gpu() -> "Iterator[GPU]":
    """A simulated GPU in the place of ``torch.cuda``."""
    from tests.transfer.simgpu.gpu import GPU  # here, as above

    made = GPU(seed=0)
    with made.installed():
        yield made
    assert made.faults == []


def missing(pool: Pool | None) -> list[int]:
    """The members of a shared pool that have not joined, or are dead."""
    assert pool is not None
    assert pool._members is not None
    return pool._members.missing()
