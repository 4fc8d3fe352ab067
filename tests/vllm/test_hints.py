"""Hints in real vLLM: kept, brought, dropped and unknown ones. None changes an answer."""

import json

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

UNKNOWN = ["kv.fetch", "1.0", {"source": "another node"}]


@pytest.fixture(scope="module")
def engine(start, tmp_path_factory):
    # One request at a time, and a pool of about 127 rows of 32 KiB.
    return start(connector(disk(tmp_path_factory.mktemp("root"))), max_num_seqs=1)


def serve(engine, *requests):
    """The tokens that follow each prompt, with its hints; what they computed is stored."""
    said = engine.call(
        "soak",
        requests=[{"prompt": tokens, "max_tokens": 8, "hints": hints} for tokens, hints in requests],
        at_once=len(requests),
        aborts={},
        resets=[],
    )
    engine.generate([1, 2, 3])
    engine.call("settle")
    engine.generate([1, 2, 3])  # vLLM tells figures in the step after
    return [item["tokens"][0] for item in said]


def figure(engine, name, **label):
    """0 until the first request."""
    return engine.call("metrics").get(f"vllm:kvtier_{name}{json.dumps(label) if label else ''}", 0)


def fill_the_pool(engine):
    rows = int(figure(engine, "pool_rows"))
    for seed in range(1000, 1000 + rows // 10 + 2):
        engine.store(prompt(seed))
    engine.call("settle")


def test_pinned_blocks_outlive_the_eviction_of_all_others(engine, plain):
    pinned, other = prompt(1), prompt(2)
    expected = plain.generate(pinned, other)
    hints, pinned_rows = figure(engine, "hints", kind="pin"), figure(engine, "pool_pinned_rows")
    assert serve(engine, (pinned, [["kv.pin", "1.0", {"seconds": 3600}]]), (other, None)) == expected
    assert figure(engine, "pool_pinned_rows") == pinned_rows + 10
    assert figure(engine, "hints", kind="pin") == hints + 1
    fill_the_pool(engine)
    assert figure(engine, "pool_pinned_rows") == pinned_rows + 10
    before = {source: figure(engine, "hit_blocks", source=source) for source in ("pool", "disk")}
    assert engine.call("reset")  # the device's
    assert engine.generate(pinned, other) == expected
    assert figure(engine, "hit_blocks", source="pool") == before["pool"] + 10
    assert figure(engine, "hit_blocks", source="disk") == before["disk"] + 10


def test_a_pin_takes_what_the_device_holds_already(engine, plain):
    wanted = prompt(3)
    expected = plain.generate(wanted)
    before = figure(engine, "pool_held_rows")
    assert serve(engine, (wanted, None)) == expected
    assert figure(engine, "pool_held_rows") == before
    assert serve(engine, (wanted, [["retain", "1", {"seconds": 3600, "priority": 9}]])) == expected
    assert figure(engine, "pool_held_rows") == before + 10


def test_what_is_dropped_is_computed_again(engine, plain):
    wanted = prompt(4)
    expected = plain.generate(wanted)
    assert serve(engine, (wanted, [["kv.drop", "1.0", {}]])) == expected
    stored = figure(engine, "device_stored_blocks")
    assert engine.call("reset")
    assert serve(engine, (wanted, None)) == expected
    assert figure(engine, "device_stored_blocks") == stored + 10


def test_a_prompt_is_brought_while_its_request_waits(engine, plain):
    running, waiting = prompt(5), prompt(6)
    assert serve(engine, (waiting, None)) == plain.generate(waiting)
    fill_the_pool(engine)
    assert engine.call("reset")
    loaded = engine.call("prefetched", first=running, second=waiting, hints=[["kv.prefetch", "1.0", {}]])
    assert loaded == 10
    assert engine.generate(waiting) == plain.generate(waiting)


def test_hints_that_nobody_knows_are_counted(engine, plain):
    wanted = prompt(7)
    hints = [UNKNOWN, ["pin", "9.0", {"seconds": 60}], ["retain", "1", {"priority": 3}]]
    before = figure(engine, "hints", kind="unknown")
    assert serve(engine, (wanted, hints)) == plain.generate(wanted)
    assert figure(engine, "hints", kind="unknown") == before + 3
