"""Much traffic through a small device and a tier in trouble: every output is right, nothing stays pinned."""

import json
import random
import time

import pytest

from tests.vllm import soak
from tests.vllm.engines import assert_all_is_over, connector, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(3600)]

REQUESTS = 300
PREFIXES = 16
PATIENCE_S = 300.0
SETTINGS = {"pool": "6MiB", "load_timeout": "1s", "miss_ttl": "1s"}
ORDERS = ({"fail": 0.05}, {"fail": 0.05, "hang": True}, {"fail": 0.05})


def requests(how_many):
    """Prompts of a shared prefix (12 blocks) and 2 to 4 blocks of their own; 8 of them do not fit into 130 blocks."""
    choice = random.Random(1)
    prefixes = [prompt(1000 + number, blocks=12, extra=0) for number in range(PREFIXES)]
    return [
        {
            "prompt": [*choice.choice(prefixes), *prompt(number, blocks=choice.randint(2, 4))],
            "max_tokens": choice.randint(8, 64),
        }
        for number in range(how_many)
    ]


def aborts(how_many):
    """Every tenth of the requests, and after how many steps."""
    return {str(number): 1 + number % 7 for number in range(5, how_many, 10)}


@pytest.fixture(scope="module")
def expected(plain):
    """What the engine without connector says to the requests."""
    return plain.call("soak", requests=requests(REQUESTS), at_once=8, aborts={}, resets=[])


def serve(engine, wanted, expected, resets):
    """All but the aborted are answered as expected."""
    said = engine.call("soak", requests=wanted, at_once=8, aborts=aborts(len(wanted)), resets=resets)
    differ = [i for i, tokens in enumerate(said) if tokens is not None and tokens != expected[i]]
    assert differ == []


def assert_there_was_trouble(books):
    for trouble in ("store_failed", "load_failed", "timeouts"):
        assert books[trouble]["awkward"] > 0, trouble


def until_it_serves(engine, wanted, expected):
    """Ask until the tier serves. After trouble it is tried again after pauses that grow to a minute."""
    give_up = time.monotonic() + PATIENCE_S
    before = engine.call("settle")["hits"].get("awkward", 0)
    while engine.call("settle")["hits"].get("awkward", 0) == before:
        assert time.monotonic() < give_up, "the tier does not serve"
        assert engine.call("reset", connector=True)  # the pool would answer
        serve(engine, wanted, expected, resets=[])


@pytest.mark.parametrize("on_reset", ["pool", "all"])
def test_c13_c30_c34_k3_o4_k4_soak(start, awkward, expected, on_reset):
    engine = start(
        connector(awkward.settings(on_reset=on_reset, **SETTINGS)),
        environment=awkward.environment,
        num_gpu_blocks_override=130,
    )
    wanted = requests(REQUESTS)
    for part, orders in zip((slice(0, 100), slice(100, 200), slice(200, 300)), ORDERS, strict=True):
        awkward.give(**orders)
        serve(engine, wanted[part], expected[part], resets=[{"after": 30}, {"after": 60}])
        awkward.give()
        if on_reset == "pool":  # where resets empty the tier, chance decides what it is asked for
            until_it_serves(engine, wanted[:8], expected)
    books = engine.call("settle")
    print(books, engine.call("metrics").get("vllm:num_preemptions"))
    assert_all_is_over(books)
    assert sum(books["resets"].values()) == 6
    assert books["hits"]["pool"] > 0
    if on_reset == "pool":
        assert_there_was_trouble(books)
    assert engine.call("metrics")["vllm:num_preemptions"] > 0
    assert engine.close() == 0


def test_c13_c30_k3_o4_k4_soak_with_asynchronous_scheduling(start, awkward, expected):
    engine = start(
        connector(awkward.settings(**SETTINGS)),
        environment=awkward.environment,
        num_gpu_blocks_override=70,  # few enough for preemptions without a reset
        asynchronous=True,
    )
    assert engine.call("is_asynchronous")
    wanted = requests(100)
    for orders in ORDERS:
        awkward.give(**orders)
        serve(engine, wanted, expected, resets=[])  # with a step under way vLLM refuses them
        awkward.give()
        until_it_serves(engine, wanted[:8], expected)
    books = engine.call("settle")
    print(books)
    assert_all_is_over(books)
    assert_there_was_trouble(books)
    assert books["hits"]["pool"] > 0
    assert engine.call("metrics")["vllm:num_preemptions"] > 0
    assert engine.close() == 0


@pytest.mark.parametrize("model", soak.MODELS)
def test_v1_v2_c04_a_short_run_of_the_long_soak(model, capsys):
    status = soak.main(["--requests", "120", "--models", model, "--json"])
    said = capsys.readouterr().out
    report = json.loads(said.splitlines()[-1])
    assert status == report["mismatches"] == report["stops"] == 0, said
    assert report["answers"] + report["aborts"] == 120
    for number in ("hit_blocks", "aborts", "preemptions", "resets"):
        assert report[number] > 0, number
