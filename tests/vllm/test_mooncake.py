"""Real vLLMs with a Mooncake Store behind them, whose master is killed and restarted, or between two of them.

Run where both vLLM and Mooncake are installed.
"""

from typing import Any

import pytest

from tests.tiers.mooncake_store import MooncakeStore, is_installed
from tests.vllm.engines import connector, needs_vllm
from tests.vllm.far_stores import hand_over, serve_through

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not is_installed(), reason="needs the package mooncake-transfer-engine-non-cuda"),
    pytest.mark.timeout(1200),
]


@pytest.fixture
def store(tmp_path):
    store = MooncakeStore(tmp_path)
    yield store
    store.stop()


def settings(store: MooncakeStore, capacity: str, **limits: object) -> dict[str, Any]:
    far = {"type": "mooncake", "master_server_address": store.address, "limits": limits}
    return connector({"pool": {"capacity": capacity}, "tiers": {"far": far}})


def test_i19_a_master_that_is_killed_twice_costs_hits_alone_in_200_requests(start, plain, store):
    engine = start(settings(store, "1MiB", miss_ttl="100ms", lookup_timeout="1s", load_timeout="1s"))
    serve_through(engine, plain, lambda: store.end(store.master), store.start_master)
    assert engine.close() == 0


def test_c25_one_engine_prefills_and_another_decodes(start, plain, store):
    hand_over(start(settings(store, "4MiB")), start(settings(store, "4MiB")), plain)
