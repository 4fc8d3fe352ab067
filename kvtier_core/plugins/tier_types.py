"""Tier types by name: what is installed, and the class behind one name, checked.

Only the named type's plugin is imported. Whatever its import raises becomes a ``PluginError`` that names the
distribution, its version and the cause.
"""

from dataclasses import dataclass
from typing import Any

from kvtier_core.errors import PluginError
from kvtier_core.hookspecs import TIER_GROUP
from kvtier_core.masking import mask_text
from kvtier_core.plugins.check import check_tier_class
from kvtier_core.plugins.discovery import Offer, find_offers, pick
from kvtier_core.suggest import did_you_mean

_ANY_MAJOR = TIER_GROUP.rpartition(".")[0] + "."
_OUR_DISTRIBUTIONS = {"memory": "kvtier-memory", "disk": "kvtier-disk", "fsspec": "kvtier-fsspec"}


@dataclass(frozen=True, kw_only=True)
class TierType:
    """A tier type that was loaded and checked. ``cls`` is built as ``cls(settings, context)``."""

    name: str
    cls: type[Any]
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """Distribution and version, as messages name a plugin."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, kw_only=True)
class TierTypeEntry:
    """What is known of a tier type without importing it. ``status`` is ``"available"`` or why it can't be used."""

    name: str
    distribution: str
    version: str
    group: str
    status: str


def list_tier_types() -> list[TierTypeEntry]:
    """Every tier type that an installed distribution offers, of any API major, sorted by name. Imports none."""
    offers = find_offers(_ANY_MAJOR)
    return [
        TierTypeEntry(
            name=offer.name,
            distribution=offer.distribution,
            version=offer.version,
            group=offer.group,
            status=_status(offer, offers),
        )
        for offer in offers
    ]


def _status(offer: Offer, offers: list[Offer]) -> str:
    if offer.group != TIER_GROUP:
        return f"unusable: made for another API, this core speaks {TIER_GROUP}"
    rivals = [
        item.origin
        for item in offers
        if item is not offer and (item.name, item.group) == (offer.name, offer.group)
    ]
    return f"conflict: also offered by {' and '.join(rivals)}" if rivals else "available"


def load_tier_type(name: str) -> TierType:
    """Import and check the tier type *name*.

    Raises ``PluginError`` when no distribution offers it, when several do, when it can't be imported, or when it
    fails ``check_tier_class``.
    """
    offers = find_offers(_ANY_MAJOR)
    ours = [item for item in offers if item.group == TIER_GROUP]
    offer = pick(ours, name, "tier type")
    if offer is None:
        raise PluginError(_unknown(name, ours, [item for item in offers if item.name == name]))
    cls = import_target(offer, "tier type")
    check_tier_class(cls, f"tier type {name!r} of {offer.origin}")
    return TierType(name=name, cls=cls, distribution=offer.distribution, version=offer.version)


def import_target(offer: Offer, what: str) -> Any:  # noqa: ANN401 - whatever a third party put there
    """Import what an entry point names. Raises ``PluginError`` with distribution, version and cause."""
    try:
        return offer.entry_point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{what} {offer.name!r} of {offer.origin} can't be imported from {offer.target}: "
            f"{type(error).__name__}: {mask_text(str(error))}"
        ) from error


def _unknown(name: str, offers: list[Offer], other_majors: list[Offer]) -> str:
    if other_majors:
        origins = " and ".join(f"{offer.origin} (group {offer.group})" for offer in other_majors)
        return (
            f"tier type {name!r} is offered only for another API major, by {origins}; "
            f"this core speaks {TIER_GROUP}: install a version of the plugin that does too"
        )
    known = sorted({offer.name for offer in offers})
    message = f"unknown tier type {name!r}{did_you_mean(name, {*known, *_OUR_DISTRIBUTIONS})}"
    if name in _OUR_DISTRIBUTIONS:
        message = f"tier type {name!r} is not installed: pip install {_OUR_DISTRIBUTIONS[name]}"
    return f"{message} (installed: {', '.join(known) or 'none'})"
