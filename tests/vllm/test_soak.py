"""Much traffic through a small device and a tier in trouble: every output is right, nothing stays pinned."""

import random

import pytest

from tests.vllm.engines import connector, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(3600)]

REQUESTS = 300
PREFIXES = 16


def requests():
    """Prompts of a shared prefix (12 blocks) and 2 to 4 blocks of their own; 8 of them do not fit into 130 blocks."""
    choice = random.Random(1)
    prefixes = [prompt(1000 + number, blocks=12, extra=0) for number in range(PREFIXES)]
    return [
        {
            "prompt": [*choice.choice(prefixes), *prompt(number, blocks=choice.randint(2, 4))],
            "max_tokens": choice.randint(8, 64),
        }
        for number in range(REQUESTS)
    ]


def test_c13_c30_k3_o4_k4_soak(start, awkward, plain):
    engine = start(
        connector(awkward.settings(pool="6MiB", load_timeout="1s", miss_ttl="1s", breaker_pause="100ms")),
        environment=awkward.environment,
        num_gpu_blocks_override=130,
    )
    wanted = requests()
    aborts = {str(number): 1 + number % 7 for number in range(5, REQUESTS // 3, 10)}
    hits = []
    for part, orders in enumerate(({"fail": 0.05}, {"fail": 0.05, "hang": True}, {"fail": 0.05})):
        awkward.give(**orders)
        these = wanted[part * 100 : part * 100 + 100]
        said = engine.call("soak", requests=these, at_once=8, aborts=aborts, resets=[30, 60])
        expected = plain.call("soak", requests=these, at_once=8, aborts={}, resets=[])
        differ = [i for i, tokens in enumerate(said) if tokens is not None and tokens != expected[i]]
        assert differ == [], f"part {part}"
        hits.append(engine.call("books")["hits"])
    awkward.give()
    books = engine.call("settle")
    print(hits, books, engine.call("metrics").get("vllm:num_preemptions"))
    assert books["pins"] == books["leases"] == books["jobs"] == books["detached"] == books["requests"] == 0
    assert hits[0]["awkward"] > 0
    assert hits[2]["awkward"] > hits[1]["awkward"]  # the tier serves again after it hung
    assert hits[0]["pool"] > 0
    assert engine.call("metrics")["vllm:num_preemptions"] > 0
    assert engine.close() == 0


def test_c13_c30_k3_o4_k4_soak_with_asynchronous_scheduling(start, awkward, plain):
    engine = start(
        connector(awkward.settings(pool="6MiB", load_timeout="1s", miss_ttl="1s", breaker_pause="100ms")),
        environment=awkward.environment,
        num_gpu_blocks_override=70,  # few enough for preemptions without a reset
        asynchronous=True,
    )
    assert engine.call("is_asynchronous")
    wanted = requests()[: REQUESTS // 3]
    aborts = {str(number): 1 + number % 7 for number in range(5, len(wanted), 10)}
    expected = plain.call("soak", requests=wanted, at_once=8, aborts={}, resets=[])
    # No resets: with a step under way vLLM refuses them.
    for orders in ({"fail": 0.05}, {"fail": 0.05, "hang": True}, {"fail": 0.05}):
        awkward.give(**orders)
        said = engine.call("soak", requests=wanted, at_once=8, aborts=aborts, resets=[])
        differ = [i for i, tokens in enumerate(said) if tokens is not None and tokens != expected[i]]
        assert differ == [], orders
    awkward.give()
    books = engine.call("settle")
    assert books["pins"] == books["leases"] == books["jobs"] == books["detached"] == books["requests"] == 0
    assert books["hits"]["pool"] > 0
    assert books["hits"]["awkward"] > 0
    assert engine.call("metrics")["vllm:num_preemptions"] > 0
    assert engine.close() == 0
