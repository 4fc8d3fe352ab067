"""A tiny model for vLLM, engines in processes of their own, and what the engine without connector answers."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.distributions import Site
from tests.vllm.engines import EngineProcess
from tests.vllm.models import save_hybrid_model, save_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid_model(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EngineProcess]]:
    """Starts an engine: ``start(kv_transfer_config, **options)``; ended with the module's last test."""
    logs = tmp_path_factory.mktemp("logs")
    numbers = count()
    engines: list[EngineProcess] = []

    def make(kv_transfer_config=None, *, model=model, **options):
        engine = EngineProcess(model, logs / f"{next(numbers)}.log", kv_transfer_config, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The engine without connector and without prefix cache: what it says is right."""
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    engine = EngineProcess(model, log, enable_prefix_caching=False)
    yield engine
    engine.close()


class Awkward:
    """An awkward tier for an engine to come: its settings, the environment that finds it, and its orders."""

    def __init__(self, directory: Path) -> None:
        self._orders = directory / "orders.json"
        self.give()
        site = Site(directory)
        site.install(
            "kvtier-awkward",
            {"kvtier.tiers.v1": {"awkward": "awkward_module:AwkwardTier"}},
            {"awkward_module": Path(__file__).with_name("awkward.py").read_text()},
        )
        self.environment = {"PYTHONPATH": str(directory)}

    def give(self, **orders: object) -> None:
        """Replace the orders; the file is always whole."""
        new = self._orders.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.rename(self._orders)

    def settings(self, *, pool: str = "4MiB", on_reset: str = "pool", **limits: object) -> dict[str, Any]:
        """kvtier's settings with a pool and this tier."""
        tier = {"type": "awkward", "orders": str(self._orders), "limits": limits}
        return {
            "pool": {"capacity": pool},
            "on_reset": on_reset,
            "tiers": {"awkward": tier},
            "lookup_order": ["awkward"],
        }


@pytest.fixture
def awkward(tmp_path: Path) -> Awkward:
    return Awkward(tmp_path)
