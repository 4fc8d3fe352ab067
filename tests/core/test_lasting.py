"""Which tiers outlive the process, and what is said where none does (V6)."""

import pytest

from kvtier_core import load_settings
from kvtier_core.engine import lasting_tiers, why_nothing_lasts

MEMORY = {"type": "memory", "capacity": "1MiB"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)


def settings(root=None, **more):
    on_disk = {} if root is None else {"disk": {"type": "disk", "root": str(root), **more}}
    tiers = {"memory": MEMORY, **on_disk}
    order = [name for name, tier in tiers.items() if tier.get("enabled", True)]
    return load_settings(overrides={"tiers": tiers, "lookup_order": order})


def test_v6_a_tier_that_keeps_its_blocks_lasts_and_one_in_memory_does_not(tmp_path):
    both = settings(tmp_path / "root")
    assert lasting_tiers(both) == ["disk"]
    assert why_nothing_lasts(both) is None


@pytest.mark.parametrize("root", [None, "root"])
def test_v6_where_every_tier_ends_with_the_process_that_is_said(root):
    without = settings(root, enabled=False)
    assert lasting_tiers(without) == []
    assert why_nothing_lasts(without) == (
        "nothing will be restored after a restart: what 'memory' holds ends with this process; add a tier that keeps "
        'its blocks, such as one of type "disk"'
    )


def test_v6_without_a_tier_the_option_that_names_a_file_is_the_readers():
    for option in ("--config", "kvtier_config"):
        assert why_nothing_lasts(load_settings(), option) == (
            "nothing will be restored from a tier: no tier is configured, and no settings file was given: "
            f"name one with {option} or KVTIER_CONFIG"
        )
