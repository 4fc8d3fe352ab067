"""Makes a tier on the blocking interface (contract C52) into one on the hook specs.

``adapter`` holds the hooks, ``instance`` one opened tier with its I/O threads, ``work`` the order of its calls,
``contents`` what it is believed to hold (``presence``, ``bounds``, ``events``), ``calls`` the one place a tier's
methods are called from, ``jobs`` the results that are due.
"""

from kvtier_core.manager.blocking.adapter import BlockTierAdapter
from kvtier_core.manager.blocking.presence import PresenceSet

__all__ = ["BlockTierAdapter", "PresenceSet"]
