"""The port of tiers on the blocking interface (contract C52).

``tier`` is the port and knows the current instance. ``instance`` is one opened tier with its I/O threads: it acts.
``state`` decides, under one lock, by the order of the calls (``work``) and by what the tier is believed to hold
(``contents`` and its ``bounds``). ``calls`` makes every call on the tier. ``jobs`` knows which results are due.
"""

from kvtier_core.manager.blocking.tier import BlockingTier

__all__ = ["BlockingTier"]
