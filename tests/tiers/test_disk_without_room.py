"""The disk tier on a disk that others have filled: it opens, serves, gives room back and never ends the process."""

import pytest

from tests.tiers.small_disk import KINDS, run_on

OPTIONS = "options = {'capacity': 24 * t.MIB, 'extent_size': '2MiB', 'min_free': %s}\n"
STORED = "with t.drive(mnt / 'r', **options) as tier:\n    assert tier.store(t.rows(*t.KEYS[:300])).error is None\n"

NEARLY_FULL = """
import errno
def use():
    tier = t.direct(mnt / "r", **options)
    assert t.load(tier, *t.KEYS[:300]) == t.rows(*t.KEYS[:300])
    try:
        outcomes = t.store(tier, *t.KEYS[300:304])
    except OSError as error:
        outcomes = [error]
    for outcome in outcomes:
        assert outcome is True or outcome.errno == errno.ENOSPC, outcome
    tier.close()
    return 0
for left in (0, 1, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256):
    disk.fill(mnt, left)
    status = disk.child_ended(use)
    assert status == 0, (left, status)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_c30_c33_a_nearly_full_disk_never_ends_the_process(tmp_path, kind):
    run_on(kind, tmp_path, OPTIONS % 0 + STORED + NEARLY_FULL)


FULL_THEN_NOT = """
disk.fill(mnt)
with t.drive(mnt / "r", **options) as tier:
    assert tier.load(t.KEYS[:300]).rows == t.rows(*t.KEYS[:300])
    result = tier.store(t.rows(*t.KEYS[300:304]))
    assert result.error is None or "No space left" in result.error or "disk is full" in result.error, result
    (mnt / "ballast").unlink()
    t.wait_until(lambda: tier.store(t.rows(*t.KEYS[300:304])).error is None, "stores work again")
    assert tier.load(t.KEYS[:304]).rows == t.rows(*t.KEYS[:304])
"""


@pytest.mark.parametrize("kind", KINDS)
def test_c33_a_disk_that_is_full_at_the_start_is_served_and_stores_go_on_once_there_is_room(tmp_path, kind):
    run_on(kind, tmp_path, OPTIONS % 0 + STORED + FULL_THEN_NOT)


FLOOR = """
import os
def free():
    status = os.statvfs(mnt)
    return status.f_bavail * status.f_frsize
tier = t.direct(mnt / "r", **options)  # its journal is new, and has no room yet
if not RESTART:
    disk.fill(mnt)
    assert free() < 1 << 18
    tier.follow()
else:
    tier.close()
    disk.fill(mnt)
    tier = t.direct(mnt / "r", **options)
assert free() >= 4 * t.MIB
left = t.load(tier, *t.KEYS[:300])
assert 100 < len(left) < 300, len(left)
assert left.items() <= t.rows(*t.KEYS[:300]).items()
assert tier.contains(t.KEYS[:300]) == [key in left for key in t.KEYS[:300]]
assert t.store(tier, *t.KEYS[300:304]) == [True] * 4
tier.close()
"""


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_c33_on_a_full_disk_the_free_space_floor_is_given_back(tmp_path, kind, restart):
    run_on(kind, tmp_path, OPTIONS % (4 << 20) + STORED + f"RESTART = {restart}" + FLOOR)


CLOSED_WHEN_FULL = """
tier = t.direct(mnt / "r", **options)
disk.fill(mnt)
t.store(tier, *t.KEYS[300:304])
tier.follow()
tier.close()
(mnt / "ballast").unlink()
tier = t.direct(mnt / "r", **options)
assert len(tier._store.opened.index.owners()) == 1
tier.close()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_c33_a_full_disk_disturbs_neither_follow_nor_close(tmp_path, kind):
    run_on(kind, tmp_path, OPTIONS % 0 + STORED + CLOSED_WHEN_FULL)


DIRECT_WHEN_FULL = """
from kvtier_disk.extents.place import why_not_direct
from kvtier_disk.folder import Folder
(mnt / "r").mkdir(mode=0o700)
root = Folder(mnt / "r")
before = why_not_direct(root, None)
disk.fill(mnt)
assert why_not_direct(root, None) == before
assert not list((mnt / "r").iterdir())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_c33_whether_there_is_o_direct_does_not_depend_on_room(tmp_path, kind):
    run_on(kind, tmp_path, DIRECT_WHEN_FULL)
