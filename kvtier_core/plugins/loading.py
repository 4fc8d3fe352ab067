"""Tier types and eviction policies by name: found, imported and checked. Only the named plugin is imported.

A policy's target is called as ``target(capacity)`` and returns an ``EvictionPolicy``; a class with such a constructor
will do. The names of built-in policies are the core's: a plugin's policy of such a name is never used, and an error in
the log says so.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_core.blocktier import BlockTier
from kvtier_core.errors import PluginError
from kvtier_core.hookspecs import TIER_GROUP
from kvtier_core.masking import mask_text
from kvtier_core.plugins.check import check_tier_class, expected_signature, method_problems
from kvtier_core.plugins.discovery import POLICY_GROUP, Offer, find_offers, pick, usable_names
from kvtier_core.policies import BUILT_IN, CheckedPolicy, EvictionPolicy, PolicyFactory
from kvtier_core.suggest import did_you_mean
from kvtier_core.tier_settings import TierSettings

_ANY_MAJOR = TIER_GROUP.rpartition(".")[0] + "."
_OUR_TIERS = {
    "memory": "kvtier-memory",
    "disk": "kvtier-disk",
    "fsspec": "kvtier-fsspec",
    "mooncake": "kvtier-mooncake",
    "valkey": "kvtier-valkey",
}
_OUR_POLICIES = {"arc": "kvtier-policies", "s3fifo": "kvtier-policies"}
_POLICY_METHODS = ("insert", "release", "remove", "evict")

_log = logging.getLogger("kvtier.plugins")


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
    distribution offers the type, several do, it is blocked, can't be imported, or fails ``check_tier_class``.
    """
    offers = find_offers(_ANY_MAJOR, blocked)
    ours = [item for item in offers if item.group == TIER_GROUP]
    offer = pick(ours, name, "tier type")
    if offer is None:
        raise PluginError(_unknown_tier(name, ours, [item for item in offers if item.name == name]))
    cls = offer.load("tier type")
    check_tier_class(cls, f"tier type {name!r} of {offer.origin}")
    return TierType(name=name, cls=cls, distribution=offer.distribution, version=offer.version)


def class_of_tier(tier_type: TierType, settings: TierSettings) -> type[Any]:
    """The class that serves a tier configured like this: a type may choose among several by its settings."""
    cls: type[Any] = tier_type.cls
    return cls.for_settings(settings) if issubclass(cls, BlockTier) else cls


def _unknown_tier(name: str, offers: Sequence[Offer], other_majors: Sequence[Offer]) -> str:
    if other_majors:
        origins = " and ".join(f"{offer.origin} (group {offer.group})" for offer in other_majors)
        return (
            f"tier type {name!r} is offered only for another API major, by {origins}; "
            f"this core speaks {TIER_GROUP}: install a version of the plugin that does too"
        )
    known = sorted(usable_names(offers))
    message = f"unknown tier type {name!r}{did_you_mean(name, {*known, *_OUR_TIERS})}"
    if name in _OUR_TIERS:
        message = f"tier type {name!r} is not installed: pip install {_OUR_TIERS[name]}"
    return f"{message} (installed: {', '.join(known) or 'none'})"


def load_policy(name: str, blocked: Collection[str] = ()) -> PolicyFactory:
    """The built-in policy *name*, or a plugin's, imported and checked.

    *blocked* are normalized names of distributions. Raises ``PluginError`` when no distribution offers it, several do,
    it is blocked, can't be imported, or makes something that lacks a method of ``EvictionPolicy``.
    """
    offers = [offer for offer in find_offers(POLICY_GROUP, blocked) if offer.group == POLICY_GROUP]
    if name in BUILT_IN:
        for offer in offers:
            if offer.name == name and not offer.blocked:
                _log.error(
                    "eviction policy %r is built in; the one of that name from %s (%s) is never used: rename it there",
                    name,
                    offer.origin,
                    offer.target,
                )
        return BUILT_IN[name]
    found = pick(offers, name, "eviction policy")
    if found is None:
        raise PluginError(_unknown_policy(name, offers))
    factory: PolicyFactory = found.load("eviction policy")
    if problems := list(_policy_problems(factory)):
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise PluginError(
            f"eviction policy {name!r} of {found.origin} ({found.target}) is not one of {POLICY_GROUP}:{lines}"
        )
    return lambda capacity: CheckedPolicy(factory(capacity), name, found.origin)


def _unknown_policy(name: str, offers: Sequence[Offer]) -> str:
    if name in _OUR_POLICIES:
        return f"eviction policy {name!r} is not installed: pip install {_OUR_POLICIES[name]}"
    known = sorted({*BUILT_IN, *usable_names(offers), *_OUR_POLICIES})
    return f"unknown eviction policy {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"


def _policy_problems(factory: object) -> Iterator[str]:
    if not callable(factory):
        yield f"the entry point's target is {factory!r}, which can't be called with a capacity"
        return
    try:
        policy = factory(1)
    except Exception as error:  # noqa: BLE001 - a third party's code; it harms only who names it
        yield f"calling it with a capacity of 1 raised {type(error).__name__}: {mask_text(str(error))}"
        return
    for method in _POLICY_METHODS:
        spec = getattr(EvictionPolicy, method)
        if hasattr(policy, method):
            yield from method_problems(type(policy), method, spec)
        else:
            yield f"{method}: missing; expected {expected_signature(method, spec)}"
