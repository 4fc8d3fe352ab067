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

    def stored(self, request: str, keys: Sequence[OffloadKey]) -> None:
        """A device store succeeded: each tier may be given each of *keys* once more."""
        self._stored.update((request, key) for key in keys)

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
        for key in keys if hook == "submit_store" else ():
            self._submitted[tier, request, key] += 1
            if self._submitted[tier, request, key] > self._stored[request, key]:
                raise InvariantError(f"{tier} is given {key.hex()} once too often by request {request} (C20)")

    def request_finished(self, tier: str, request: str) -> None:
        """``on_request_finished``: once, and only after ``on_new_request``."""
        self.calls.append(Call("on_request_finished", tier, request))
        if (tier, request) not in self.open:
            raise InvariantError(f"{tier} is told twice that request {request} is over (C26)")
        self.open.remove((tier, request))

    def other(self, hook: str, tier: str, keys: Sequence[OffloadKey] = ()) -> None:
        """A hook that belongs to no request and may come at any time."""
        self.calls.append(Call(hook, tier, "", tuple(keys)))
