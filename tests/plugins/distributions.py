"""Distributions made to order, for tests of what is found through entry points."""

import importlib
from collections.abc import Mapping
from pathlib import Path

TIER_SOURCE = """
from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from kvtier_core.tier import BlockTier, Duration, Size, TierInfo, TierSettings


class Account(BaseModel):
    user: str = ""
    password: str = ""
    auth: SecretStr | None = None


class Settings(TierSettings):
    root: str
    url: str = "fake://"
    password: SecretStr | None = None
    storage_options: dict[str, str] = Field(default_factory=dict)
    hosts: list[str] = Field(default_factory=list)
    chunk: Size = 4096
    pause: Duration | None = None
    account: Account = Account()
    accounts: list[Account] = Field(default_factory=list)
    named: dict[str, Account] = Field(default_factory=dict)


class Tier(BlockTier):
    Settings = Settings
    info = TierInfo(medium="fake", default_capacity=8 << 20)

    def open(self): ...
    def contains(self, keys): return [False] * len(keys)
    def store(self, key, block): ...
    def load(self, key, into): return False
    def delete(self, keys): ...
    def close(self): ...
"""
"""A tier type that is as it should be, with settings of every kind."""


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
