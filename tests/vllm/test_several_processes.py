"""Real vLLM as it is served: the front end, the scheduler and the workers are processes of their own."""

import time

import pytest

from tests.vllm.engines import BLOCK, connector, disk, needs_vllm, prompt

PATIENCE_S = 120.0

pytestmark = [needs_vllm, pytest.mark.timeout(2400)]


def external_hits(engine):
    return engine.call("metrics").get("vllm:external_prefix_cache_hits", 0)


def store(engine, tier, *prompts):
    """The tokens that follow each prompt, once the tier has its 10 blocks: a reset drops those on the way."""
    tokens = engine.store(*prompts)
    until_stored(engine, tier, 10 * len(prompts))
    return tokens


def until_stored(engine, tier, blocks):
    give_up = time.monotonic() + PATIENCE_S
    stored = f'vllm:kvtier_tier_stored_blocks{{"tier": "{tier}"}}'
    while engine.call("metrics").get(stored, 0) < blocks:
        assert time.monotonic() < give_up, engine.log()
        engine.generate([1, 2, 3])  # vLLM tells of them with a step


def last_write(root):
    """When an extent was last written to, in nanoseconds."""
    return max(file.stat().st_mtime_ns for file in root.rglob("*.ext"))


def test_c32_k7_an_engine_killed_in_mid_traffic_leaves_hits_for_the_next(start, tmp_path, plain):
    wanted = [prompt(seed) for seed in range(1, 9)]
    expected = plain.generate(*wanted)
    first = start(connector(disk(tmp_path)), processes=3)
    assert store(first, "disk", *wanted) == expected
    assert first.call("reset", connector=True)
    assert first.generate(wanted[0]) == expected[0:1]
    assert external_hits(first) >= 10 * BLOCK
    before = last_write(tmp_path)
    first.send("generate", prompts=[prompt(seed) for seed in range(20, 60)])
    give_up = time.monotonic() + PATIENCE_S
    while last_write(tmp_path) == before:  # until blocks of these are being stored, while others are computed
        assert time.monotonic() < give_up, "none of the prompts was stored"
        time.sleep(0.001)
    first.kill()

    second = start(connector(disk(tmp_path)), processes=3)
    assert second.generate(*wanted) == expected
    assert external_hits(second) >= 10 * BLOCK
    later = [prompt(seed) for seed in range(20, 30)]
    assert second.generate(*later) == plain.generate(*later)
    assert second.close() == 0


def test_c43_two_workers_fill_one_row(start, tmp_path, plain):
    wanted = [prompt(seed) for seed in (1, 2, 3)]
    engine = start(connector(disk(tmp_path)), processes=4, tensor_parallel_size=2)
    expected = store(engine, "disk", *wanted)
    assert expected == plain.generate(*wanted)
    assert engine.call("reset")
    assert engine.generate(*wanted) == expected  # from the pool
    assert external_hits(engine) == 3 * 10 * BLOCK
    assert engine.call("reset", connector=True)
    assert engine.generate(wanted[0]) == expected[:1]  # from the disk
    assert external_hits(engine) == 4 * 10 * BLOCK
    assert engine.close() == 0


def test_k1_o3_two_workers_of_an_engine_with_randomly_seeded_hashes_share_tiers_that_end_with_it(
    start, plain, monkeypatch
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # it would be the seed
    wanted = prompt(1)
    expected = plain.generate(wanted)
    settings = {
        "pool": {"capacity": "4MiB"},
        "on_reset": "pool",
        "tiers": {"memory": {"type": "memory", "capacity": "64MiB"}},
        "lookup_order": ["memory"],
    }
    engine = start(
        connector(settings), processes=4, tensor_parallel_size=2, prefix_caching_hash_algo="xxhash"
    )
    assert store(engine, "memory", wanted) == expected
    assert engine.call("reset")
    assert engine.generate(wanted) == expected  # from the pool
    assert external_hits(engine) == 10 * BLOCK
    assert engine.call("reset", connector=True)
    assert engine.generate(wanted) == expected  # from the tier
    assert external_hits(engine) == 2 * 10 * BLOCK
    assert engine.close() == 0
