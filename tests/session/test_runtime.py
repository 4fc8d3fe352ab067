"""What a configuration becomes before anything opens."""

from pathlib import Path

import pytest

from kvtier_core.errors import ConfigError
from kvtier_core.runtime import plan_tier
from kvtier_core.settings import load_settings


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
