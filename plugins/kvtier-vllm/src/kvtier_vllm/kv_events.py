"""kvtier's events in vLLM's words, for whoever routes requests by what an engine's caches hold.

vLLM knows blocks stored and blocks removed at a medium. What kvtier says as "cleared, and then all this" it is told as
removals, for which this remembers what was said before. Decides nothing about what is told when.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm.v1.kv_offload.base import Medium, OffloadingEvent

from kvtier_core.engine import OffloadKey, TierEvent
from kvtier_vllm.adapters import KeyName
from kvtier_vllm.places import TierPlace


class EventTranslator:
    """Translates the events of one manager. Used by the scheduler's thread. *vllms* gives vLLM's key for kvtier's."""

    def __init__(self, places: Mapping[str, TierPlace], vllms: KeyName) -> None:
        self._places = places
        self._vllms = vllms
        self._told: dict[str, set[OffloadKey]] = {}
        """What vLLM was told that each place holds: ``pool``, or a tier's name."""

    def translate(self, events: Iterable[tuple[str, TierEvent]]) -> Iterator[OffloadingEvent]:
        """What vLLM is to be told, in order."""
        for place, event in events:
            told = self._told.setdefault(place, set())
            if event.kind == "cleared":
                if told:
                    yield self._say(place, list(told), removed=True)
                told.clear()
            elif event.kind == "stored":
                told.update(event.keys)
                yield self._say(place, event.keys, removed=False)
            else:
                told.difference_update(event.keys)
                yield self._say(place, event.keys, removed=True)

    def _say(self, name: str, keys: Sequence[OffloadKey], *, removed: bool) -> OffloadingEvent:
        told = list(map(self._vllms, keys))
        place = self._places.get(name)
        if place is None:  # the pool, vLLM's primary tier
            return OffloadingEvent(keys=told, medium=Medium.CPU, removed=removed, removal_expected=True)
        return OffloadingEvent(
            keys=told,
            medium=place.medium,
            removed=removed,
            locality=place.locality,
            ownership=name,
            removal_expected=not place.is_shared,
        )
