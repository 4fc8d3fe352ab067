"""What a configuration may say, and the validated result. Reads no file and imports no plugin."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtier_core.plugins.tier_types import TierType
from kvtier_core.policies import PolicyFactory
from kvtier_core.settings.layers import CONFIG_VARIABLE
from kvtier_core.tier_settings import TierSettings
from kvtier_core.units import Duration, Size

_USUAL_FILE = Path("kvtier.toml")

OnReset = Literal["all", "pool"]
"""What a cache reset forgets: every tier, or only the pool (for unchanged weights; persistent tiers keep theirs)."""


class PoolSettings(BaseModel):
    """``[pool]``: the host memory of the primary tier."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    capacity: Size = 1 << 30
    """Bytes of host memory."""
    prefault: bool = True
    """Take the memory at the start, in the background, instead of page by page when a row is first used."""
    huge_pages: bool = True
    """Take the memory in pages of 2 MiB, into which disks read faster. Where the kernel gives none, a warning says so
    and the pool works all the same. Needs ``prefault``, or a kernel whose ``shmem_enabled`` allows it."""
    policy: str = "lru"
    """Eviction policy of the pool: ``lru``, or one of an installed package (kvtier-policies: ``arc``, ``s3fifo``)."""
    block_size: Annotated[int, Field(ge=1, le=65536)] = 16
    """Tokens in a block, for engines that have no block size of their own."""
    lease_timeout: Duration = 30.0
    """Seconds a row stays reserved for a request that has stopped asking about it."""
    device_timeout: Duration = 60.0
    """Seconds until a store from the device counts as lost; its rows stay out of use until it has ended."""
    store_threshold: Annotated[int, Field(ge=1)] = 1
    """Offers for storing from which on a block is stored; each request counts once."""
    max_tracker_size: Annotated[int, Field(ge=1)] = 64_000
    """Keys whose offers are counted, where a ``store_threshold`` of the pool or of a tier is above 1."""
    max_events: Annotated[int, Field(ge=1)] = 65_536
    """Changes of the pool's contents kept for events; past it the next events are the whole contents anew."""
    max_promotion: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of the pool that may be reserved for promotions at a time."""
    max_loading: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Fraction of the pool that promotions and overdue loads of all tiers may hold together; the rest is for stores."""
    break_even_margin: Annotated[float, Field(gt=0)] = 1.25
    """How much longer loading may take than computing, as a factor, where the engine says what computing costs."""
    break_even_probe: Duration = 10.0
    """Seconds between loads from a tier that is slower than that, to see whether it still is."""
    check_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads that check the proofs of loaded blocks."""
    copy_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Threads that share a copy of 8 MiB or more between engine and pool where the engine's KV is in host memory."""
    max_cascade: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of the pool that may be pinned for stores to all tiers together."""


class TopSettings(BaseModel):
    """The settings above the first table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    on_reset: OnReset = "all"
    """What a cache reset forgets: ``"all"`` tiers, or only the ``"pool"`` (for unchanged weights)."""
    lookup_order: tuple[str, ...] | None = None
    """Names of the enabled tiers in the order they are asked; unset means their order in the file."""
    blocked_plugins: tuple[str, ...] = ()
    """Distributions whose tier types, policies and commands count as not installed."""


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
