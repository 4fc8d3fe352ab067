"""What installed distributions offer, for people: tier types, policies and commands. Imports no plugin."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtier_core.hookspecs import TIER_GROUP
from kvtier_core.plugins.discovery import COMMAND_GROUP, POLICY_GROUP, Offer, find_offers
from kvtier_core.policies import BUILT_IN

_GROUPS = (TIER_GROUP, POLICY_GROUP, COMMAND_GROUP)
_ANY = "kvtier."


@dataclass(frozen=True, kw_only=True)
class PluginEntry:
    """What is known of one offer without importing it. ``status`` is ``"available"`` or why it can't be used."""

    name: str
    distribution: str
    version: str
    group: str
    status: str


def list_plugins(blocked: Collection[str] = ()) -> list[PluginEntry]:
    """Every offer for kvtier, of any kind and API major, sorted by group and name.

    *blocked* are normalized names of distributions; their offers are listed as blocked.
    """
    offers = find_offers(_ANY, blocked)
    entries = [
        PluginEntry(
            name=offer.name,
            distribution=offer.distribution,
            version=offer.version,
            group=offer.group,
            status=_status(offer, offers),
        )
        for offer in offers
    ]
    known = {group: place for place, group in enumerate(_GROUPS)}
    return sorted(entries, key=lambda entry: known.get(entry.group, len(known)))


def list_tier_types(blocked: Collection[str] = ()) -> list[PluginEntry]:
    """Every tier type that an installed distribution offers, of any API major, sorted by name."""
    return sorted(
        (entry for entry in list_plugins(blocked) if _kind(entry.group) == _kind(TIER_GROUP)),
        key=lambda entry: entry.name,
    )


def _kind(group: str) -> str:
    return group.rpartition(".")[0]


def _status(offer: Offer, offers: Sequence[Offer]) -> str:
    if offer.blocked:
        return "blocked by the setting blocked_plugins"
    if offer.group not in _GROUPS:
        speaks = [group for group in _GROUPS if _kind(group) == _kind(offer.group)]
        return f"unusable: made for another API, this core speaks {', '.join(speaks or _GROUPS)}"
    if offer.group == POLICY_GROUP and offer.name in BUILT_IN:
        return "unusable: the built-in policy has that name"
    rivals = [
        item.origin
        for item in offers
        if item is not offer and not item.blocked and (item.name, item.group) == (offer.name, offer.group)
    ]
    return f"conflict: also offered by {' and '.join(rivals)}" if rivals else "available"
