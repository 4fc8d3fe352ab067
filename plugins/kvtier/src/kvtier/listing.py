"""What installed distributions offer, and whether it can be used, without importing any of it unless that is asked."""

from collections.abc import Collection, Sequence

from kvtier.commands import load_command
from kvtier.engines import load_engine
from kvtier_core.errors import PluginError
from kvtier_core.hookspecs import TIER_GROUP
from kvtier_core.plugins import load_policy, load_tier_type
from kvtier_core.plugins.discovery import (
    CERTIFY_GROUP,
    COMMAND_GROUP,
    ENGINE_GROUP,
    POLICY_GROUP,
    Offer,
    find_offers,
)
from kvtier_core.policies import BUILT_IN

AVAILABLE = "available"
BROKEN = "broken: "
"""How the status of an offer begins that could not be loaded."""
_GROUPS = (TIER_GROUP, POLICY_GROUP, COMMAND_GROUP, ENGINE_GROUP, CERTIFY_GROUP)


def list_plugins(blocked: Collection[str] = ()) -> list[tuple[Offer, str]]:
    """Every offer for kvtier, of any kind and API major, sorted by group and name: each with its status.

    That is ``AVAILABLE`` or why it can't be used. *blocked* are normalized names of distributions; their offers are
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
    return f"conflict: also offered by {' and '.join(rivals)}" if rivals else AVAILABLE


def load_offer(offer: Offer, blocked: Collection[str]) -> str:
    """Import what is available, as its use would, and say what came of it: ``"loaded"``, or why it is ``BROKEN``."""
    try:
        if offer.group == TIER_GROUP:
            load_tier_type(offer.name, blocked)
        elif offer.group == POLICY_GROUP:
            load_policy(offer.name, blocked)
        elif offer.group == COMMAND_GROUP:
            load_command(offer.name, blocked=blocked)
        else:
            load_engine(offer)
    except PluginError as error:
        return BROKEN + " ".join(str(error).split())
    return "loaded"
