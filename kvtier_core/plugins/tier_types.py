"""Tier types by name: the class behind one name, checked.

Only the named type's plugin is imported. Whatever its import raises becomes a ``PluginError`` that names the
distribution, its version and the cause.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_core.errors import PluginError
from kvtier_core.hookspecs import TIER_GROUP
from kvtier_core.plugins.check import check_tier_class
from kvtier_core.plugins.discovery import Offer, find_offers, pick, usable_names
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


def load_tier_type(name: str, blocked: Collection[str] = ()) -> TierType:
    """Import and check the tier type *name*.

    *blocked* are normalized names of distributions that count as not installed. Raises ``PluginError`` when no
    distribution offers the type, when several do, when it is blocked, when it can't be imported, or when it fails
    ``check_tier_class``.
    """
    offers = find_offers(_ANY_MAJOR, blocked)
    ours = [item for item in offers if item.group == TIER_GROUP]
    offer = pick(ours, name, "tier type")
    if offer is None:
        raise PluginError(_unknown(name, ours, [item for item in offers if item.name == name]))
    cls = offer.load("tier type")
    check_tier_class(cls, f"tier type {name!r} of {offer.origin}")
    return TierType(name=name, cls=cls, distribution=offer.distribution, version=offer.version)


def _unknown(name: str, offers: Sequence[Offer], other_majors: Sequence[Offer]) -> str:
    if other_majors:
        origins = " and ".join(f"{offer.origin} (group {offer.group})" for offer in other_majors)
        return (
            f"tier type {name!r} is offered only for another API major, by {origins}; "
            f"this core speaks {TIER_GROUP}: install a version of the plugin that does too"
        )
    known = sorted(usable_names(offers))
    message = f"unknown tier type {name!r}{did_you_mean(name, {*known, *_OUR_DISTRIBUTIONS})}"
    if name in _OUR_DISTRIBUTIONS:
        message = f"tier type {name!r} is not installed: pip install {_OUR_DISTRIBUTIONS[name]}"
    return f"{message} (installed: {', '.join(known) or 'none'})"
