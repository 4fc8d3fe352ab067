"""What ``kv_connector_extra_config`` may say to kvtier, checked before anything starts.

Decides which names are known and what kvtier's settings are made of. It opens nothing and names no vLLM type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier_core import ConfigError, Settings, load_settings
from kvtier_core.engine import parse_duration

CONFIG_OPTION = "kvtier_config"
OURS = {
    CONFIG_OPTION: "absolute path of a kvtier.toml",
    "kvtier": "table of kvtier's settings, stronger than the file and the environment",
    "kvtier_open_timeout": "how long workers, scheduler and tiers may take to meet and open, such as '60s'",
    "kvtier_shutdown_timeout": "how long the tiers may take to shut down, such as '10s'",
    "kvtier_weights_digest": "'full' (default), or 'edges': trust the first and last MiB of each file of a local model",
    "kvtier_identity": "a text that no other weights have, where kvtier can't tell them apart by itself",
}
_OF_A_TIER = {
    **{name: what for name, what in OURS.items() if name != "kvtier_weights_digest"},
    "kvtier_identity": "a text that stands for weights, configuration and layout of what is stored",
}
"""Options of a tier behind vLLM's own tiering, which sees neither weights nor devices."""
VLLMS = {
    "spec_name": "KvtierSpec",
    "spec_module_path": "kvtier_vllm",
    "blocks_per_chunk": "vLLM blocks in one of kvtier's blocks",
    "block_size": "the same in tokens",
    "offload_prompt_only": "whether generated tokens are left out (vLLM's default: true)",
    "self_describing_kv_events": "whether KV events carry tokens",
    "canonical_layout": "whether blocks serve engines of any tensor-parallel size (vLLM's default: false)",
}
"""Options that vLLM's connector reads itself."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options. Timeouts in seconds."""

    config: Path | None = None
    settings: Mapping[str, Any]
    open_timeout_s: float = 60.0
    shutdown_timeout_s: float = 10.0
    trusts_edges: bool = False
    """Whether the first and last MiB of a weight file stand for all of it."""
    identity: str | None = None
    """What the operator calls the weights; of a tier behind vLLM's own tiering, all that its bytes depend on."""

    def load(self) -> Settings:
        """The settings: the table in the options over the environment over the file.

        Raises ``ConfigError`` or ``PluginError`` as ``load_settings`` does.
        """
        return load_settings(file=self.config, overrides=self.settings)


def read_options(extra_config: Mapping[str, Any]) -> Options:
    """Check ``kv_connector_extra_config``. Raises ``ConfigError`` that names every option it does not know."""
    unknown = sorted(set(extra_config) - set(OURS) - set(VLLMS))
    if unknown:
        allowed = "; ".join(f"{name} ({what})" for name, what in (OURS | VLLMS).items())
        raise ConfigError(
            f"kv_connector_extra_config: kvtier knows no {', '.join(map(repr, unknown))}. Allowed are: {allowed}. "
            "Settings of pool and tiers belong into the table 'kvtier' or the file 'kvtier_config'"
        )
    return Options(
        config=_config_path(extra_config.get(CONFIG_OPTION)),
        settings=_table(extra_config.get("kvtier", {})),
        open_timeout_s=_seconds("kvtier_open_timeout", extra_config.get("kvtier_open_timeout", "60s")),
        shutdown_timeout_s=_seconds(
            "kvtier_shutdown_timeout", extra_config.get("kvtier_shutdown_timeout", "10s")
        ),
        trusts_edges=_trusts_edges(extra_config.get("kvtier_weights_digest", "full")),
        identity=_identity(extra_config.get("kvtier_identity")),
    )


def read_tier_options(options: Mapping[str, Any]) -> Options:
    """Check the options of ``KvtierTier``. Raises ``ConfigError`` that names every option it does not know."""
    unknown = sorted(set(options) - set(_OF_A_TIER) - {"locality"})
    if unknown:
        allowed = "; ".join(f"{name} ({what})" for name, what in _OF_A_TIER.items())
        raise ConfigError(
            f"a tier of kvtier knows no {', '.join(map(repr, unknown))}. Allowed are: {allowed}"
        )
    return read_options({name: value for name, value in options.items() if name in OURS})


def _config_path(value: object) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str) or not Path(value).is_absolute():
        raise ConfigError(
            f"kvtier_config = {value!r} must be an absolute path: vLLM's processes need not share a directory"
        )
    return Path(value)


def _table(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"kvtier must be a table, such as {{'pool': {{'capacity': '4GiB'}}}}, not a {type(value).__name__}"
        )
    return value


def _trusts_edges(value: object) -> bool:
    if value not in ("full", "edges"):
        raise ConfigError(f"kvtier_weights_digest = {value!r} must be 'full' or 'edges'")
    return value == "edges"


def _identity(value: object) -> str | None:
    if value is None:
        return None
    if not (isinstance(value, str) and value.strip()):
        raise ConfigError(
            f"kvtier_identity must be a text that no other model or configuration has, not {value!r}: leave it out, "
            "and what kvtier can't identify is reused by no other run"
        )
    return value


def _seconds(name: str, value: object) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
