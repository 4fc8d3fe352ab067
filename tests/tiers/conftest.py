"""What several tests of tiers get."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiers.extents import MIB, drive, rows


@pytest.fixture
def warnings(caplog) -> Callable[[], list[str]]:
    """What has been warned of."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def root(tmp_path, request) -> Path:
    """The root of a disk tier that holds the test module's ``HELD`` in the first slots of its one extent."""
    held = request.module.HELD
    with drive(tmp_path, capacity=16 * MIB) as tier:
        assert tier.store(rows(*held)).error is None
    return tmp_path
