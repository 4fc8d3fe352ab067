"""Another user of the machine has a pool of the name that an engine's pool has."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from kvtier_core.transfer import SCHEDULER, Pool, PoolGeometry
from tests.transfer.conftest import TIMEOUT_S

_GEOMETRY = PoolGeometry(num_rows=4, row_bytes=4096, num_workers=2)
_OTHER = 65533
"""A user that nobody is."""
_HOLD = """
import os, sys
from kvtier_core.transfer import Pool, PoolGeometry
os.setuid(int(sys.argv[1]))
pool = Pool.open(PoolGeometry(num_rows=4, row_bytes=4096, num_workers=2), sys.argv[2], 0)
print(os.fstat(pool.fd).st_ino, flush=True)
sys.stdin.read()
"""
_TRY = """
import os, sys
os.setuid(int(sys.argv[1]))
try:
    os.open(sys.argv[2], os.O_RDONLY)
except OSError as error:
    print(type(error).__name__)
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def others_pool(name: str) -> Iterator[int]:
    """The inode of a pool of this name that a process of another user has until the test ends."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(_OTHER), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:  # whose end of stdin ends it
        assert holder.stdout is not None
        yield int(holder.stdout.readline())


def test_s16_another_users_pool_of_the_name_is_in_nobodys_way(name: str, others_pool: int) -> None:
    with Pool.open(_GEOMETRY, name, 0) as pool, Pool.open(None, name, SCHEDULER) as scheduler:
        assert os.fstat(pool.fd).st_ino == os.fstat(scheduler.fd).st_ino != others_pool


@pytest.mark.usefixtures("others_pool")
def test_s16_another_users_pool_is_not_taken_for_the_one_that_is_waited_for(name: str) -> None:
    with pytest.raises(TimeoutError, match="worker 0, which is to make it, did not start, .* another user"):
        Pool.open(None, name, SCHEDULER, timeout_s=0.1)


def test_c38_another_user_cannot_open_a_pools_memory(name: str) -> None:
    with Pool.open(_GEOMETRY, name, 0) as pool:
        path = f"/proc/{os.getpid()}/fd/{pool.fd}"
        tried = subprocess.run(
            [sys.executable, "-c", _TRY, str(_OTHER), path],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    assert tried.stdout == "PermissionError\n"
