"""What another user of the machine does, in a process of its own with that user's rights."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiers.small_disk import child_ended

OTHER, THIRD = 65533, 65532
"""Users that nobody is."""
GROUP = 65531
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def act_as(uid: int, work: Callable[[], object], *, group: int | None = None) -> None:
    """Do *work* as the user *uid*, in *group* beside its own, in a child; fails with what it raises."""

    def changed() -> int:
        os.setgroups([] if group is None else [group])
        os.setgid(uid)
        os.setuid(uid)
        work()
        return 0

    assert child_ended(changed) == 0


@contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that every user can go through."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    try:
        yield base
    finally:
        shutil.rmtree(base)
