"""The port of tiers on the blocking interface (contract C52).

``tier`` is the port and knows which instance is current. ``instance`` is one opened tier with its I/O threads;
it acts, and ``state`` decides under one lock: the order of the calls (``work``) and what the tier is believed to hold
(``contents``, made of ``presence``, ``bounds`` and ``events``). ``calls`` is the one place a tier's methods are called
from, ``jobs`` knows which results are due.
"""

from kvtier_core.manager.blocking.presence import PresenceSet
from kvtier_core.manager.blocking.tier import BlockingTier

__all__ = ["BlockingTier", "PresenceSet"]
