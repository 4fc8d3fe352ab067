"""Tells people when a tier leaves the path, when it is back, and that its work takes too long, or never ends.

Decides nothing else.

What an engine sees of a faulty tier is misses and time; this is what says which tier, and what to do.
"""

import logging
from collections.abc import Mapping

from kvtier_core.coordinator.breaker import BreakerState
from kvtier_core.coordinator.tier_record import TierRecord
from kvtier_core.manager.guard import TierIdentity

_KINDS = ("lookups", "loads", "stores")
"""What each of a tier's breakers stops."""
_CLOSED = BreakerState.CLOSED


class PathLog:
    """Looks at the tiers' breakers and time-outs, and logs what has changed since its last look."""

    def __init__(self, log: logging.Logger, identities: Mapping[str, TierIdentity]) -> None:
        self._log = log
        self._identities = identities
        self._out: dict[str, list[str]] = {}
        self._owing: dict[str, list[str]] = {}
        self._timeouts: dict[str, int] = {}

    def look(self, tiers: Mapping[str, TierRecord]) -> None:
        """Log changes. Cost: a few comparisons a tier."""
        for name, tier in tiers.items():
            services = dict(zip(_KINDS, tier.services, strict=True))
            out = [kind for kind, service in services.items() if service.breaker.state is not _CLOSED]
            if out != self._out.get(name, []):
                self._tell_path(self._identities[name], out)
                self._out[name] = out
            owing = [kind for kind in ("lookups", "stores") if services[kind].owes]
            if owing != self._owing.get(name, []):
                self._tell_owing(self._identities[name], owing, tier.stores.max_unanswered)
                self._owing[name] = owing
            late = tier.counters.timeouts
            if late != self._timeouts.get(name, 0):
                self._tell_late(self._identities[name], self._timeouts.get(name, 0), late)
                self._timeouts[name] = late

    def _tell_path(self, identity: TierIdentity, out: list[str]) -> None:
        if out:
            self._log.warning(
                "%s is out of the path for %s after failures in a row: it is passed over, and tried again after "
                "growing pauses; see the warnings before this one",
                identity,
                " and ".join(out),
            )
        else:
            self._log.warning("%s is in the path again", identity)

    def _tell_owing(self, identity: TierIdentity, owing: list[str], limit: int) -> None:
        if owing:
            self._log.warning(
                "%s has left %d overdue %s without any answer: it gets no more of them until it hands out results for "
                "some. Every job must get a result, if only an error: tell the plugin's author",
                identity,
                limit,
                " and as many ".join(owing),
            )
        else:
            self._log.warning("%s has answered overdue jobs, and gets new ones again", identity)

    def _tell_late(self, identity: TierIdentity, before: int, now: int) -> None:
        if before.bit_length() != now.bit_length():  # the first, and then ever more rarely
            self._log.warning(
                "%s did not answer in time, %s by now: requests went on without it. If its storage is as fast as "
                "it can be, raise limits.lookup_timeout, load_timeout or store_timeout",
                identity,
                "once" if now == 1 else f"{now} times",
            )
