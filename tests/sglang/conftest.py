"""A tiny model for SGLang, and stand-ins for its KV memory with tiers behind them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier_core.plugins import TierType
from kvtier_core.settings import PoolSettings, Settings
from kvtier_core.tier_settings import TierLimits, TierSettings
from kvtier_sglang import cache as cache_module
from kvtier_testing.faulty import FaultyTier
from tests.sglang.engines import save_model
from tests.sglang.paged import PATIENCE_S, ROW_BYTES, Engine, open_with_disk

Open = Callable[..., Engine]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def open_on_disk(tmp_path: Path) -> Iterator[Open]:
    opened: list[Engine] = []

    def open_one(components: Sequence[str] = ("full",), **options) -> Engine:
        opened.append(open_with_disk(tmp_path, *components, **options))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.cache.close(PATIENCE_S)


@pytest.fixture
def tier() -> list[FaultyTier]:
    """The fault-injecting tier, once it is open."""
    return []


@pytest.fixture
def open_faulty(tier: list[FaultyTier], monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    class Registered(FaultyTier):
        def __init__(self, settings, context):
            super().__init__(settings, context)
            tier.append(self)

    opened: list[Engine] = []

    def open_one(
        components: Sequence[str] = ("full",),
        *,
        rows: int = 64,
        load_patience_s: float = PATIENCE_S,
        **limits: float,
    ) -> Engine:
        monkeypatch.setattr(cache_module, "_ANSWER_PATIENCE_S", PATIENCE_S)
        monkeypatch.setattr(cache_module, "_LOAD_PATIENCE_S", load_patience_s)
        kind = TierType(name="faulty", cls=Registered, distribution="test", version="1")
        settings = Settings(
            pool=PoolSettings(capacity=rows * ROW_BYTES),
            tiers={"one": TierSettings(type="faulty", limits=TierLimits(**limits))},
            tier_types={"one": kind},
        )
        opened.append(Engine(settings, components))
        return opened[-1]

    yield open_one
    for each in tier:
        each.hold.clear()
        each.raise_in.clear()
    for engine in opened:
        engine.cache.close(PATIENCE_S)
