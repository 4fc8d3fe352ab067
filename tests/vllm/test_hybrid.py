"""Real vLLM with two KV groups, one of them with a sliding window: both are loaded up to one token."""

import pytest

from tests.vllm.engines import BLOCK, connector, disk, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def hybrid_plain(start, hybrid_model):
    return start(model=hybrid_model, enable_prefix_caching=False, num_gpu_blocks_override=100)


@pytest.fixture(scope="module")
def engine(start, hybrid_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    return start(connector(disk(root)), model=hybrid_model, num_gpu_blocks_override=100)


def external_hits(engine):
    return engine.call("metrics").get("vllm:external_prefix_cache_hits", 0)


@pytest.mark.parametrize("extra", [0, 9], ids=["whole blocks", "and a rest"])
def test_k12_o1_both_groups_come_back_from_pool_and_disk(engine, hybrid_plain, extra):
    wanted = prompt(1 + extra, blocks=8, extra=extra)
    expected = hybrid_plain.generate(wanted)
    assert len(set(expected[0])) > 2, "the output says nothing"
    assert engine.store(wanted) == expected
    engine.call("settle")
    for connector_too, source in ((False, "pool"), (True, "disk")):
        assert engine.call("reset", connector=connector_too)
        before, hits = external_hits(engine), engine.call("books")["hits"].get(source, 0)
        assert engine.generate(wanted) == expected
        assert external_hits(engine) - before >= 7 * BLOCK
        # All blocks of the one group and a window of the other; of whole blocks vLLM leaves a token to compute.
        loaded = engine.call("books")["hits"][source] - hits
        assert loaded == (10 if extra else 9)


def test_k12_o3_a_prefix_ends_where_a_window_is_missing(engine, hybrid_plain):
    shared = prompt(31, blocks=6, extra=0)
    first = [*shared, *prompt(32, blocks=2)]
    second = [*shared, *prompt(33, blocks=2)]
    expected = hybrid_plain.generate(first, second)
    assert engine.store(first) == expected[:1]
    engine.call("settle")
    assert engine.call("reset", connector=True)
    # Of the windows only the last one of the first prompt was stored: there is none that ends with the shared part.
    assert engine.generate(second) == expected[1:]
    assert engine.generate(first) == expected[:1]


def test_c13_nothing_is_held_when_all_is_quiet(engine):
    engine.store(prompt(41))
    books = engine.call("settle")
    assert books["pins"] == books["leases"] == books["jobs"] == books["detached"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_v1_c04_what_a_window_left_behind_is_not_stored_after_a_reset(engine, hybrid_plain, seed):
    # The first request decodes until its windows have left the prompt. Then the others take all other device blocks.
    first = {"prompt": prompt(100 + seed, blocks=10, extra=0), "max_tokens": 140}
    second = {"prompt": prompt(110 + seed, blocks=2), "max_tokens": 90}
    others = [{"prompt": prompt(200 + 20 * seed + i, blocks=8), "max_tokens": 1} for i in range(12)]
    requests = [first, second, *others]
    expected = hybrid_plain.call("soak", requests=requests, at_once=8, aborts={}, resets=[])
    resets = [{"after": 12, "running": False, "connector": True}]
    assert engine.call("soak", requests=requests, at_once=2, aborts={}, resets=resets) == expected
    engine.call("settle")
    for connector_too in (False, True):
        assert engine.call("reset", connector=connector_too)
        assert engine.generate(first["prompt"], max_tokens=8) == [expected[0]["tokens"][0][:8]]
