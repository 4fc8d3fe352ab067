"""A session over a real pool, a real CPU device and fault-injecting tiers, with an engine's KV in small tensors."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from kvtier_core.plugins import TierType
from kvtier_core.proof import row_bytes_for
from kvtier_core.runtime import open_session
from kvtier_core.settings import PoolSettings, Settings
from kvtier_core.tier_settings import TierLimits, TierSettings
from kvtier_core.transfer import CPUDevice, Direction, KVLayout
from kvtier_testing.faulty import FaultyTier
from tests.session.toy import LAYERS, PATIENCE_S, TOKENS, Toy, namespace_of
from tests.transfer.kv import said_to_be_on_a_gpu


@pytest.fixture
def tiers() -> dict[str, FaultyTier]:
    """The tiers of the session under test, by name, as soon as it is open."""
    return {}


@pytest.fixture
def make_toy(monkeypatch: pytest.MonkeyPatch, tiers: dict[str, FaultyTier]) -> Iterator[Callable[..., Toy]]:
    toys: list[Toy] = []

    class Registered(FaultyTier):
        def __init__(self, settings, context):
            super().__init__(settings, context)
            tiers[context.name] = self

    def make(
        names: tuple[str, ...] = ("one",),
        *,
        num_rows: int = 16,
        num_blocks: int = 32,
        is_on_a_gpu: bool = False,
        **limits: float,
    ) -> Toy:
        gate = threading.Event()
        gate.set()

        class GatedDevice(CPUDevice):
            def _copy(self, direction, plan):
                if direction is Direction.STORE:
                    gate.wait()
                super()._copy(direction, plan)

        monkeypatch.setattr("kvtier_core.transfer.cpu.CPUDevice", GatedDevice)
        kv = [torch.zeros(num_blocks, TOKENS, 8) for _ in range(LAYERS)]
        layout = said_to_be_on_a_gpu(KVLayout(kv)) if is_on_a_gpu else KVLayout(kv)
        settings = Settings(
            pool=PoolSettings(capacity=num_rows * row_bytes_for(layout.payload_bytes[0])),
            tiers={name: TierSettings(type="faulty", limits=TierLimits(**limits)) for name in names},
            tier_types={
                name: TierType(name="faulty", cls=Registered, distribution="test", version="1")
                for name in names
            },
        )
        namespace = namespace_of(layout, "0", "1", "2")
        toy = Toy(open_session(settings, namespace, layout), kv, gate)
        toys.append(toy)
        return toy

    yield make
    for toy in toys:
        toy.gate.set()
        for tier in tiers.values():
            tier.raise_in.clear()
            for event in tier.hang_in.values():
                event.set()
        toy.session.close(PATIENCE_S)
