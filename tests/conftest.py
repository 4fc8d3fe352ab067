"""What every test gets: no network but loopback, nothing left in /dev/shm, and distributions made to order."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest

SHARED_MEMORY = Path("/dev/shm")

hypothesis.settings.register_profile("kvtier", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("kvtier")


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(os.listdir(SHARED_MEMORY))
    yield
    ours = {name for name in set(os.listdir(SHARED_MEMORY)) - before if "kvtier" in name}
    assert not ours, f"left in {SHARED_MEMORY}: {sorted(ours)}"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVTIER_"):
            monkeypatch.delenv(name)


class Site:
    """A directory on the import path into which a test installs distributions of its own making."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(
        self,
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str],
        *,
        version: str = "1.0",
    ) -> None:
        """Write the metadata of distribution *name* and its modules (source by module name)."""
        metadata = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [
            f"[{group}]\n" + "".join(f"{key} = {target}\n" for key, target in names.items())
            for group, names in entry_points.items()
        ]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        for module, source in modules.items():
            (self.path / f"{module}.py").write_text(source)
        importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A ``Site`` on ``sys.path``; its modules are forgotten afterwards."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    yield Site(path)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


TIER_SOURCE = """
from pydantic import Field, SecretStr, field_validator, model_validator

from kvtier_core import BlockTier, Duration, Size, TierInfo, TierSettings


class Settings(TierSettings):
    root: str
    url: str = "fake://"
    password: SecretStr | None = None
    storage_options: dict[str, str] = Field(default_factory=dict)
    hosts: list[str] = Field(default_factory=list)
    chunk: Size = 4096
    pause: Duration | None = None


class Tier(BlockTier):
    Settings = Settings
    info = TierInfo(medium="fake")

    def open(self): ...
    def contains(self, keys): return [False] * len(keys)
    def store(self, key, block): ...
    def load(self, key, into): return False
    def delete(self, keys): ...
    def close(self): ...
"""
"""A tier type that is as it should be, with settings of every kind."""


@pytest.fixture
def install_tier(site: Site) -> Callable[..., None]:
    """Installs a distribution that offers one tier type: ``install_tier("fake", source=..., ...)``."""

    def install(
        name: str = "fake",
        *,
        distribution: str | None = None,
        source: str = TIER_SOURCE,
        group: str = "kvtier.tiers.v1",
        target: str = "Tier",
    ) -> None:
        distribution = distribution or f"kvtier-{name}"
        module = distribution.replace("-", "_") + "_module"
        site.install(distribution, {group: {name: f"{module}:{target}"}}, {module: source})

    return install
