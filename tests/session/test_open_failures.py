"""What an engine that could not start leaves behind: nothing, but what a tier that hangs may still touch (C34)."""

import threading
from pathlib import Path

import pytest
import torch

from kvtier_core.errors import TierOpenError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.plugins import TierType
from kvtier_core.proof import row_bytes_for
from kvtier_core.runtime import open_session
from kvtier_core.settings import PoolSettings, Settings
from kvtier_core.tier_settings import TierSettings
from kvtier_core.transfer import KVLayout
from kvtier_testing.faulty import FaultyTier
from tests.session.toy import namespace_of


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


@pytest.mark.parametrize("hangs", [True, False])
def test_c34_the_pool_stays_mapped_for_a_tier_that_hangs_while_it_opens(caplog, hangs):
    views, release, ended = [], threading.Event(), threading.Event()

    class Tier(FaultyTier):
        @hookimpl
        def on_open(self, pool):
            views.append(pool)
            if not hangs:
                raise TierOpenError("no storage")
            release.wait()
            ended.set()

    layout = KVLayout([torch.zeros(4, 4, 8)])
    payload = layout.payload_bytes[0]
    settings = Settings(
        pool=PoolSettings(capacity=4 * row_bytes_for(payload)),
        tiers={"one": TierSettings(type="mine")},
        tier_types={"one": TierType(name="mine", cls=Tier, distribution="test", version="1")},
    )
    namespace = namespace_of(layout, "0")
    with pytest.raises(TierOpenError, match="did not open within" if hangs else "no storage"):
        open_session(settings, namespace, layout, open_timeout_s=0.2)
    assert is_mapped(views[0].address) is hangs
    assert ("is kept until this process ends" in caplog.text) is hangs
    release.set()
    assert not hangs or ended.wait(20.0)


def test_b18_a_tier_that_hangs_while_it_opens_costs_one_timeout(tmp_path):
    """What is left of it, and a second, is for the tiers that did open."""
    release, told = threading.Event(), []

    class Tier(FaultyTier):
        @hookimpl
        def on_open(self, pool):
            if self.context.name == "hangs":
                release.wait()

        @hookimpl
        def shutdown(self, timeout_s):
            told.append((self.context.name, timeout_s))

    layout = KVLayout([torch.zeros(4, 4, 8)])
    settings = Settings(
        pool=PoolSettings(capacity=4 * row_bytes_for(layout.payload_bytes[0])),
        tiers={name: TierSettings(type="mine") for name in ("opens", "hangs")},
        tier_types={
            name: TierType(name="mine", cls=Tier, distribution="test", version="1")
            for name in ("opens", "hangs")
        },
    )
    try:
        with pytest.raises(TierOpenError, match="hangs.* did not open within 3 s"):
            open_session(settings, namespace_of(layout, "0"), layout, open_timeout_s=3.0)
    finally:
        release.set()
    assert told[0] == ("opens", 1.0)
