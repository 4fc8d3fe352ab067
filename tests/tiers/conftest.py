"""What several tests of tiers get."""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


@pytest.fixture
def make_server(tmp_path) -> Iterator[Callable[..., Any]]:
    """Starts Valkey servers (``ValkeyServer``) that end with the test."""
    from tests.tiers.valkey_server import ValkeyServer

    with ExitStack() as stack:

        def make(kind: type[ValkeyServer] = ValkeyServer, **options: Any) -> ValkeyServer:
            server = kind(Path(tempfile.mkdtemp(dir=tmp_path)), **options)
            stack.callback(server.stop)
            return server

        yield make


@pytest.fixture
def make_tier() -> Iterator[Callable[..., Any]]:
    """Opens Valkey tiers without the core around them; closed with the test."""
    from tests.tiers import valkey_server

    with ExitStack() as stack:

        def make(url: str, namespace: str = "space", **settings: Any) -> Any:
            tier = valkey_server.make_tier(url, namespace, **settings)
            stack.callback(tier.close)
            tier.open()
            return tier

        yield make
