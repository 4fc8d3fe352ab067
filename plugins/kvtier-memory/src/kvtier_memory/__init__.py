"""The memory tier: blocks in a dictionary. The shortest complete tier, and the one to read before writing another.

A tier on the blocking interface stores, loads and deletes; everything else (threads, priorities, presence, capacity
and eviction, deadlines, metrics) is the core's. What it holds ends with it: nothing survives a restart or a reset.
"""

from kvtier_memory.tier import MemorySettings, MemoryTier

__all__ = ["MemorySettings", "MemoryTier"]
