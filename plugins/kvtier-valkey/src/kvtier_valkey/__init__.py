"""The Valkey tier: one key a block in a Valkey or Redis server, shared by every engine that is given its URL."""

from kvtier_valkey.settings import ValkeySettings
from kvtier_valkey.tier import ValkeyTier

__all__ = ["ValkeySettings", "ValkeyTier"]
