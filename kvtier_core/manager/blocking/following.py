"""Follows a tier that others change too (``SupportsFollow``), on a thread of its own."""

import logging
import threading

from kvtier_core.blocktier import SupportsFollow
from kvtier_core.errors import TierOpenError
from kvtier_core.manager.blocking.calls import Fault, TierCalls
from kvtier_core.manager.guard import text_of
from kvtier_core.transfer.waiting import bounded


def interval_of(name: str, tier: SupportsFollow) -> float:
    """Seconds between two calls of ``follow``. Raises ``TierOpenError`` for what is no such number."""
    interval: object = tier.follow_interval
    if isinstance(interval, bool) or not isinstance(interval, int | float) or not interval > 0:
        raise TierOpenError(
            f"tier {name!r}: follow_interval must be a number of seconds above 0, not {text_of(interval)!r}"
        )
    return bounded(interval)


def keep_following(
    calls: TierCalls, tier: SupportsFollow, interval: float, retired: threading.Event, log: logging.Logger
) -> None:
    """Call ``follow`` every *interval* seconds until *retired* is set."""
    last: Fault | None = None
    while not retired.wait(interval):
        fault = calls.follow(tier)
        if fault is not None and fault != last:  # the same one again tells nothing new
            log.warning("%s; what it holds may have changed unnoticed", fault.text)
        last = fault
