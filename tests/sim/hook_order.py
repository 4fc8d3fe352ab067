"""What one tier may see of one request, and in which order (C20, C26). It watches calls and changes nothing."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_core.keys import OffloadKey

_REMEMBERED_CALLS = 1000


class InvariantError(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True, slots=True)
class Call:
    """A hook that a tier sees called."""

    hook: str
    tier: str
    request: str
    keys: tuple[OffloadKey, ...] = ()


class HookOrder:
    """Raises ``InvariantError`` at the first call that a tier must not see."""

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=_REMEMBERED_CALLS)
        """The hooks called lately, oldest first."""
        self.open: set[tuple[str, str]] = set()
        """(tier, request) between ``on_new_request`` and ``on_request_finished``."""
        self._stored: Counter[tuple[str, OffloadKey]] = Counter()
        self._submitted: Counter[tuple[str, str, OffloadKey]] = Counter()
        self.seen: Counter[str] = Counter()
        """Outcomes that only these calls show."""
        self._offered: dict[tuple[str, str], dict[OffloadKey, None]] = {}
        """What was offered of each request to each tier that gets it as a whole."""

    def stored(self, request: str, keys: Sequence[OffloadKey]) -> None:
        """A device store succeeded: each tier may be given each of *keys* once more."""
        self._stored.update((request, key) for key in keys)

    def whole(self, tier: str, request: str) -> None:
        """*tier* gets the whole of a request from now on: each key offered, once (C25)."""
        if (tier, request) not in self._offered:
            self._offered[tier, request] = {}

    def offered(self, request: str, keys: Sequence[OffloadKey]) -> None:
        """*keys* of a request are offered for storing."""
        for (_, name), offered in self._offered.items():
            if name == request:
                offered.update(dict.fromkeys(keys))

    def forget(self) -> None:
        """A reset: what was stored and offered before counts no more."""
        self._stored.clear()
        self._submitted.clear()
        for offered in self._offered.values():
            offered.clear()

    def new_request(self, tier: str, request: str) -> None:
        """``on_new_request``: not while the tier knows the request."""
        self.calls.append(Call("on_new_request", tier, request))
        if (tier, request) in self.open:
            raise InvariantError(f"{tier} is told of request {request} twice (C26)")
        self.open.add((tier, request))

    def submit(self, hook: str, tier: str, request: str, keys: Sequence[OffloadKey]) -> None:
        """A job: only while the tier knows the request, and a store's keys no oftener than they were stored."""
        self.calls.append(Call(hook, tier, request, tuple(keys)))
        if (tier, request) not in self.open:
            raise InvariantError(f"{hook} reaches {tier} outside the life of request {request} (C26)")
        offered = self._offered.get((tier, request))
        for key in keys if hook == "submit_store" else ():
            self._submitted[tier, request, key] += 1
            original = request.partition("~")[0]  # what a tier missed comes as a request of its own
            allowed = self._stored[original, key] if offered is None else key in offered
            self.seen["a tier got what the pool held already"] += not self._stored[original, key]
            if self._submitted[tier, request, key] > allowed:
                raise InvariantError(f"{tier} is given {key.hex()} once too often by request {request} (C20)")

    def request_finished(self, tier: str, request: str, not_stored: Sequence[OffloadKey]) -> None:
        """``on_request_finished``: once, only after ``on_new_request``, with the keys that the tier did not get."""
        self.calls.append(Call("on_request_finished", tier, request, tuple(not_stored)))
        if (tier, request) not in self.open:
            raise InvariantError(f"{tier} is told twice that request {request} is over (C26)")
        self.open.remove((tier, request))
        offered = self._offered.pop((tier, request), {})
        self.seen["a tier did not get all of a whole request"] += bool(not_stored)
        missing = [key for key in offered if not self._submitted[tier, request, key]]
        if list(not_stored) != missing:
            raise InvariantError(
                f"{tier} did not get {missing} of request {request}, was told {not_stored} (C25)"
            )

    def other(self, hook: str, tier: str, keys: Sequence[OffloadKey] = ()) -> None:
        """A hook that belongs to no request and may come at any time."""
        self.calls.append(Call(hook, tier, "", tuple(keys)))
