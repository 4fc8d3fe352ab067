"""Makes a tier on the blocking interface (contract C52) into one on the hook specs.

``adapter`` holds the hooks and knows which instance is current. ``instance`` is one opened tier with its I/O threads;
it acts, and ``state`` decides under one lock: the order of the calls (``work``) and what the tier is believed to hold
(``contents``, made of ``presence``, ``bounds`` and ``events``). ``calls`` is the one place a tier's methods are called
from, ``jobs`` keeps the results that are due.
"""

from kvtier_core.manager.blocking.adapter import BlockTierAdapter
from kvtier_core.manager.blocking.presence import PresenceSet

__all__ = ["BlockTierAdapter", "PresenceSet"]
