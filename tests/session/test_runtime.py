"""What a configuration becomes."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtier_core.errors import ConfigError
from kvtier_core.namespace import GroupSpec
from kvtier_core.proof import row_bytes_for
from kvtier_core.runtime import open_manager, plan_geometry, plan_tier
from kvtier_core.settings import PoolSettings, Settings, load_settings
from kvtier_core.transfer import KVLayout, Pool
from tests.session.toy import namespace_of


def planned(tmp_path: Path, tier: str, row_bytes: int = 4096) -> int | None:
    file = tmp_path / "kvtier.toml"
    file.write_text(f"[tiers.cold]\n{tier}")
    return plan_tier(load_settings(file=file, environ={}), "cold", row_bytes).capacity_bytes


@pytest.mark.parametrize("kind", ["memory", "async_example"], ids=["blocking interface", "hook specs"])
def test_c54_a_tier_is_told_the_capacity_that_holds_set_or_not(tmp_path, kind):
    assert planned(tmp_path, f'type = "{kind}"\ncapacity = "8MiB"') == 8 << 20
    assert planned(tmp_path, f'type = "{kind}"') == 1 << 30


def test_c54_a_default_capacity_smaller_than_a_block_is_refused_too(tmp_path):
    with pytest.raises(ConfigError, match="smaller than one block"):
        planned(tmp_path, 'type = "memory"', row_bytes=2 << 30)


def told_at_start(caplog: pytest.LogCaptureFixture, capacity: int, *block_bytes: int) -> list[str]:
    """What the log says while an engine with a KV group of each of these block sizes starts on a real pool."""
    layout = KVLayout([torch.zeros(4, 4, 8)])
    groups = tuple(
        GroupSpec(layers=(str(index),), block_bytes=size) for index, size in enumerate(block_bytes)
    )
    namespace = replace(namespace_of(layout, "0"), groups=groups)
    settings = Settings(pool=PoolSettings(capacity=capacity), tiers={}, tier_types={})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvtier"), Pool.create(plan_geometry(settings, namespace)) as pool:
        assert open_manager(settings, namespace, pool).shutdown(60.0)
    return caplog.messages


@pytest.mark.parametrize(("kib", "percent"), [(4, "50%"), (16, "20%"), (32, "11%")])
def test_b21_what_padding_and_proofs_waste_is_one_line_at_the_start(caplog, kib, percent):
    [line] = told_at_start(caplog, 1 << 30, kib << 10)
    row_bytes = row_bytes_for(kib << 10)
    assert line.startswith(f"{percent} of the pool (")
    assert f"blocks of {kib << 10} bytes lie in rows of {row_bytes} bytes" in line
    assert "pool.block_size" in line
    assert "blocks_per_chunk" in line


def test_b21_a_small_waste_or_a_small_pool_is_worth_no_line(caplog):
    assert told_at_start(caplog, 1 << 30, 64 << 10) == []
    assert told_at_start(caplog, 100 << 20, 4 << 10) == []


def test_b21_groups_of_different_sizes_are_told_to_come_closer(caplog):
    [line] = told_at_start(caplog, 1 << 30, 80 << 10, 108 << 10)
    assert line.startswith("16% of the pool (")
    assert line.endswith("choose block sizes that bring the groups closer together")


def test_i17_groups_of_any_sizes_share_rows_of_the_largest_and_the_waste_is_told(caplog):
    [line] = told_at_start(caplog, 1 << 30, 8 << 10, 188 << 10)
    assert line.startswith("49% of the pool (")
    assert line.endswith("choose block sizes that bring the groups closer together")


def test_a_start_waits_for_the_memory_of_a_small_pool(monkeypatch):
    monkeypatch.setattr("kvtier_core.runtime._PREFAULT_S", 60.0)  # this machine may be busy
    namespace = namespace_of(KVLayout([torch.zeros(4, 4, 8)]), "0")
    settings = Settings(pool=PoolSettings(capacity=256 << 20), tiers={}, tier_types={})
    with Pool.create(plan_geometry(settings, namespace)) as pool:
        manager = open_manager(settings, namespace, pool)
        assert pool.wait_for_prefault(0.0)
        assert manager.shutdown(60.0)
