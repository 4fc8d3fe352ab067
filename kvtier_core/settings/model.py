"""What a configuration may say, and the validated result. Reads no file and imports no plugin."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtier_core.plugins import TierType
from kvtier_core.policies import PolicyFactory
from kvtier_core.settings.layers import CONFIG_VARIABLE
from kvtier_core.tier_settings import TierSettings
from kvtier_core.units import Size

_USUAL_FILE = Path("kvtier.toml")

OnReset = Literal["all", "pool"]
MAX_LOADING = 0.75
"""Share of the pool that loads may hold, late ones included: the rest is for stores, whatever tiers do."""
MAX_PINNED = 0.125
"""Share of the pool that hints may pin: half of what loads leave, so that stores always find room."""


class PoolSettings(BaseModel):
    """``[pool]``: the host memory of the primary tier."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    capacity: Size = 1 << 30
    """Bytes of host memory."""
    prefault: bool = True
    """Whether the memory is taken from the machine at the start instead of at first use."""
    huge_pages: bool = True
    """Whether the memory is taken in pages of 2 MiB, into which disks read faster."""
    policy: str = "lru"
    """Eviction policy: `lru`, or one of an installed package (kvtier-policies: `arc`, `s3fifo`)."""
    block_size: Annotated[int, Field(ge=1, le=65536)] = 16
    """Tokens in a block, for engines that have no block size of their own."""
    store_threshold: Annotated[int, Field(ge=1)] = 1
    """Requests that must offer a block before the pool stores it."""
    max_promotion: Annotated[float, Field(gt=0, le=MAX_LOADING)] = 0.5
    """Share of the pool that loads from tiers may hold, at most 0.75."""
    max_cascade: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the pool that stores to all tiers together may hold."""


class TopSettings(BaseModel):
    """The settings above the first table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    on_reset: OnReset = "all"
    """Which tiers a cache reset empties: `"all"`, or `"pool"` alone where the model's weights do not change."""
    lookup_order: tuple[str, ...] | None = None
    """Names of the enabled tiers in the order they are asked; unset, their order in the file."""
    blocked_plugins: tuple[str, ...] = ()
    """Distributions that count as not installed, such as `["kvtier-disk"]`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A validated configuration.

    ``tiers`` holds every configured tier in lookup order, disabled ones last; ``tier_types`` the loaded type of each.
    ``sources`` says for each value, by its dotted name, where it came from: ``"default"``, ``"file:/path"``,
    ``"env:KVTIER_..."`` or ``"init"``. ``ignored_variables`` are environment variables that look like kvtier's but are
    put there by Kubernetes for a service of that name. ``unavailable`` are disabled tiers whose type could not be
    loaded, with the reason. ``policies`` are the eviction policies that the configuration names, by name.
    """

    pool: PoolSettings
    tiers: Mapping[str, TierSettings]
    tier_types: Mapping[str, TierType]
    on_reset: OnReset = "all"
    lookup_order: tuple[str, ...] | None = None
    blocked_plugins: tuple[str, ...] = ()
    policies: Mapping[str, PolicyFactory] = field(default_factory=dict, repr=False)
    file: Path | None = None
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    ignored_variables: tuple[str, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def enabled_tiers(self) -> dict[str, TierSettings]:
        """The tiers that take part, in the order they are asked."""
        return {name: tier for name, tier in self.tiers.items() if tier.enabled}

    def why_without_tiers(self, option: str = "--config") -> str | None:
        """Why no tier takes part and what to do, in one line; ``None`` where one does. Looks for ``./kvtier.toml``.

        *option* is what names a settings file where this is read.
        """
        if self.enabled_tiers:
            return None
        disabled = [*self.tiers, *self.unavailable]
        if disabled:
            text = f"every tier is disabled ({', '.join(disabled)}): set enabled = true for one"
        elif self.file is not None:
            text = f'no tier is configured: add a table [tiers.NAME], type from "kvtier list", to {self.file}'
        else:
            text = f"no tier is configured, and no settings file was given: name one with {option} or {CONFIG_VARIABLE}"
        if self.file is None and _USUAL_FILE.is_file():
            text += f"; ./{_USUAL_FILE} is there and was not read ({option} {_USUAL_FILE})"
        return text
