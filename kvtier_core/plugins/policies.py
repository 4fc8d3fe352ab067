"""Eviction policies of plugins (entry-point group ``kvtier.policies.v1``), found by name and checked when loaded.

A target is called as ``target(capacity)`` and returns an ``EvictionPolicy``; a class with such a constructor will do.
Only the named policy's plugin is imported. The names of built-in policies are the core's: a plugin's policy of such a
name is never used, and an error in the log says so.
"""

import logging
from collections.abc import Collection, Iterator

from kvtier_core.errors import PluginError
from kvtier_core.masking import mask_text
from kvtier_core.plugins.discovery import POLICY_GROUP, Offer, find_offers, pick, usable_names
from kvtier_core.plugins.signatures import expected_signature, signature_problems
from kvtier_core.policies import BUILT_IN, CheckedPolicy, EvictionPolicy, PolicyFactory
from kvtier_core.suggest import did_you_mean

_OUR_DISTRIBUTIONS = {"arc": "kvtier-policies", "s3fifo": "kvtier-policies"}
_METHODS = ("insert", "release", "remove", "evict")
_log = logging.getLogger("kvtier.plugins")


def load_policy(name: str, blocked: Collection[str] = ()) -> PolicyFactory:
    """The built-in policy *name*, or a plugin's, imported and checked.

    *blocked* are normalized names of distributions. Raises ``PluginError`` when nobody offers it, when several do,
    when it is blocked, when it can't be imported, or when what it makes lacks a method of ``EvictionPolicy``.
    """
    offers = [offer for offer in find_offers(POLICY_GROUP, blocked) if offer.group == POLICY_GROUP]
    if name in BUILT_IN:
        _tell_of_shadowed(name, offers)
        return BUILT_IN[name]
    offer = pick(offers, name, "eviction policy")
    if offer is None:
        if name in _OUR_DISTRIBUTIONS:
            raise PluginError(
                f"eviction policy {name!r} is not installed: pip install {_OUR_DISTRIBUTIONS[name]}"
            )
        known = sorted({*BUILT_IN, *usable_names(offers), *_OUR_DISTRIBUTIONS})
        raise PluginError(
            f"unknown eviction policy {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
        )
    factory: PolicyFactory = offer.load("eviction policy")
    problems = list(_problems(factory))
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise PluginError(
            f"eviction policy {name!r} of {offer.origin} ({offer.target}) is not one of {POLICY_GROUP}:{lines}"
        )
    return lambda capacity: CheckedPolicy(factory(capacity), name, offer.origin)


def _tell_of_shadowed(name: str, offers: Collection[Offer]) -> None:
    for offer in offers:
        if offer.name == name and not offer.blocked:
            _log.error(
                "eviction policy %r is built in; the one of that name from %s (%s) is never used: rename it there",
                name,
                offer.origin,
                offer.target,
            )


def _problems(factory: object) -> Iterator[str]:
    if not callable(factory):
        yield f"the entry point's target is {factory!r}, which can't be called with a capacity"
        return
    try:
        policy = factory(1)
    except Exception as error:  # noqa: BLE001 - a third party's code; it harms only who names it
        yield f"calling it with a capacity of 1 raised {type(error).__name__}: {mask_text(str(error))}"
        return
    for method in _METHODS:
        spec = getattr(EvictionPolicy, method)
        if not hasattr(policy, method):
            yield f"{method}: missing; expected {expected_signature(method, spec)}"
            continue
        for problem in signature_problems(type(policy), method, spec):
            yield f"{method} {problem}; expected {expected_signature(method, spec)}"
