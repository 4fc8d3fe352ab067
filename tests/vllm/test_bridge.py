"""kvtier's disk as a secondary tier of vLLM's own tiering, in real vLLM."""

from pathlib import Path

import pytest

from tests.vllm.engines import BLOCK, disk, needs_vllm, prompt, vllms_tiering

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


def tiering(root, **options):
    """vLLM's tiering with a small primary tier and one tier of kvtier's behind it."""
    tier = {"type": "KvtierTier", "module_path": "kvtier_vllm", "kvtier": disk(root), **options}
    return vllms_tiering(tier, 4 << 20)


def test_c03_c30_a_tier_of_kvtier_serves_vllms_own_tiering_over_a_restart_whatever_clients_say(
    start, tmp_path, plain
):
    environment = {"PYTHONPATH": str(ROOT)}
    wanted = [prompt(seed) for seed in (1, 2)]
    expected = plain.generate(*wanted)
    first = start(tiering(tmp_path, kvtier_identity="tiny"), environment=environment)
    assert first.store(*wanted) == expected
    first.call("settle_bridge")
    assert first.call("reset", connector=True)  # vLLM's primary tier forgets, and with it kvtier's pool
    assert first.generate(*wanted) == expected
    assert first.call("metrics")["vllm:external_prefix_cache_hits"] == 2 * 10 * BLOCK
    assert first.call("settle_bridge")["hits"] == {"disk": 20}
    assert first.close() == 0

    second = start(tiering(tmp_path, kvtier_identity="tiny"), environment=environment)
    assert second.generate(*wanted) == expected
    assert second.call("settle_bridge")["hits"] == {"disk": 20}

    asked_wrongly = prompt(3)
    for params in (
        {"kvtier": {"load_tiers": ["dsik"]}},
        {"kvtier": 5},
    ):  # C30: costs this request's hits alone
        assert second.generate(asked_wrongly, params=params) == plain.generate(asked_wrongly)
        assert second.call("reset")
    assert "names 'dsik', but the enabled tiers are 'disk'" in second.log()
    assert "must be a mapping" in second.log()
    books = second.call("settle_bridge")
    assert books["pins"] == books["jobs"] == books["leases"] == 0
    assert second.close() == 0


def test_k1_o3_hashes_that_are_not_cryptographic_never_reach_a_disk(start, tmp_path, plain):
    engine = start(
        tiering(tmp_path, kvtier_identity="tiny"),
        environment={"PYTHONPATH": str(ROOT)},
        prefix_caching_hash_algo="xxhash",
    )
    wanted = prompt(4)
    expected = plain.generate(wanted)
    assert engine.store(wanted) == expected
    assert engine.call("settle_bridge")["stored"] == {"disk": 0}
    assert engine.call("reset", connector=True)
    assert engine.generate(wanted) == expected
    assert engine.call("settle_bridge")["hits"] == {}
    assert "prefix_caching_hash_algo is not cryptographic" in engine.log()
    assert engine.close() == 0


def test_v11_two_workers_of_this_host_are_served_over_a_restart(start, tmp_path, plain):
    wanted = prompt(5)
    expected = plain.generate(wanted)
    for hits in (0, 10 * BLOCK):
        engine = start(
            tiering(tmp_path, kvtier_identity="tiny"),
            processes=4,
            environment={"PYTHONPATH": str(ROOT)},
            tensor_parallel_size=2,
        )
        assert engine.store(wanted) == expected
        assert engine.call("reset", connector=True)  # waits until the tier has taken what it was given
        assert engine.call("metrics").get("vllm:external_prefix_cache_hits", 0) == hits
        assert engine.close() == 0


def test_v11_windows_and_joined_blocks_which_the_spec_refuses_are_served(
    start, tmp_path, hybrid_model, plain
):
    environment = {"PYTHONPATH": str(ROOT)}
    options = {"model": hybrid_model, "num_gpu_blocks_override": 100}
    wanted = prompt(6)
    said = []
    hits: dict[str, int] = {}
    for transfer in (
        None,
        *[tiering(tmp_path, kvtier_identity="hybrid")] * 2,
    ):
        if transfer is not None:
            transfer["kv_connector_extra_config"]["blocks_per_chunk"] = 2
        engine = start(transfer, environment=environment, **options)
        said.append(engine.store(wanted))
        if transfer is not None:
            hits = engine.call("settle_bridge")["hits"]
        assert engine.close() == 0
    assert said[0] == said[1] == said[2]
    assert hits.get("disk", 0) > 0
