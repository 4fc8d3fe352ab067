"""What installed distributions offer, and whether it can be used, without importing any of it."""

from collections.abc import Collection, Sequence

from kvtier_core.hookspecs import TIER_GROUP
from kvtier_core.plugins.discovery import CERTIFY_GROUP, COMMAND_GROUP, POLICY_GROUP, Offer, find_offers
from kvtier_core.policies import BUILT_IN

_GROUPS = (TIER_GROUP, POLICY_GROUP, COMMAND_GROUP, CERTIFY_GROUP)


def list_plugins(blocked: Collection[str] = ()) -> list[tuple[Offer, str]]:
    """Every offer for kvtier, of any kind and API major, sorted by group and name: each with its status.

    That is ``"available"`` or why it can't be used. *blocked* are normalized names of distributions; their offers are
    listed as blocked.
    """
    offers = find_offers("kvtier.", blocked)
    offers.sort(key=lambda offer: _GROUPS.index(offer.group) if offer.group in _GROUPS else len(_GROUPS))
    return [(offer, _status(offer, offers)) for offer in offers]


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
