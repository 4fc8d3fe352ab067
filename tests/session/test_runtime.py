"""What a configuration becomes."""

import threading
from pathlib import Path

import pytest
import torch

from kvtier_core.errors import ConfigError
from kvtier_core.proof import row_bytes_for
from kvtier_core.runtime import open_session, plan_tier
from kvtier_core.settings import PoolSettings, Settings, load_settings
from kvtier_core.transfer import KVLayout
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


@pytest.mark.parametrize("copy_threads", [1, 3])
def test_c42_as_many_threads_share_copies_as_the_settings_say(monkeypatch, copy_threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(8))
    layout = KVLayout([torch.zeros(4, 4, 8)])
    (payload,) = layout.payload_bytes
    namespace = namespace_of(layout, "0")
    pool = PoolSettings(capacity=4 * row_bytes_for(payload), copy_threads=copy_threads)
    with open_session(Settings(pool=pool, tiers={}, tier_types={}), namespace, layout):
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("kvtier-copy-") for name in names) == copy_threads - 1
