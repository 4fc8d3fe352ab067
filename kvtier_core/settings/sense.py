"""Whether valid values make sense together (contract C54).

Each finding says which value, why it can't work and what to change. What needs the engine's geometry (a pool of less
than one block of this model) is checked where that is known.
"""

import logging
from collections.abc import Collection, Iterable, Iterator

from kvtier_core.plugins.discovery import find_offers, normalized
from kvtier_core.proof import ROW_ALIGNMENT
from kvtier_core.settings.layers import variable_for
from kvtier_core.settings.model import PoolSettings
from kvtier_core.suggest import did_you_mean
from kvtier_core.tier_settings import TierLimits, TierSettings
from kvtier_core.values import TierInfo

Finding = tuple[tuple[str, ...], str]
"""The path of a value and what is wrong with it."""

_SMALLEST_ROW = f"a block takes at least {ROW_ALIGNMENT} bytes"

_log = logging.getLogger("kvtier.settings")


def pool_findings(pool: PoolSettings) -> Iterator[Finding]:
    """Nonsense in ``[pool]`` alone."""
    if pool.capacity < ROW_ALIGNMENT:
        yield ("pool", "capacity"), f'{pool.capacity} bytes hold no block ({_SMALLEST_ROW}): try "1GiB"'


def tier_findings(
    name: str, tier: TierSettings, info: TierInfo, pool: PoolSettings | None
) -> Iterator[Finding]:
    """Nonsense in ``[tiers.NAME]``, alone, for a type with this *info*, and together with the pool."""
    path = ("tiers", name)
    if tier.capacity is not None and tier.capacity < ROW_ALIGNMENT:
        message = f"{tier.capacity} bytes hold no block ({_SMALLEST_ROW}): raise it, or set enabled = false"
        yield (*path, "capacity"), message
    if tier.ttl is not None and not tier.ttl:
        yield (*path, "ttl"), "0 would serve nothing: leave it out for blocks that never expire"
    yield from _unenforced_findings(path, tier, info)
    limits = tier.limits
    for field in TierLimits.model_fields:
        if field.endswith("_timeout") and not getattr(limits, field):
            yield (*path, "limits", field), 'must be more than 0 seconds, such as "2s"'
    if pool is not None and limits.max_cascade > pool.max_cascade:
        message = (
            f"{limits.max_cascade:g} is more than pool.max_cascade ({pool.max_cascade:g}), which counts all tiers: "
            "lower it"
        )
        yield (*path, "limits", "max_cascade"), message


def _unenforced_findings(path: tuple[str, ...], tier: TierSettings, info: TierInfo) -> Iterator[Finding]:
    """Settings that the core leaves to the tier, and the tier to nobody (C55)."""
    if info.bounded_by == "storage":
        for field in sorted(tier.model_fields_set & {"capacity", "policy"}):
            message = "nobody would keep to it: the storage of this tier has a limit of its own; leave it out"
            yield (*path, field), message
    if tier.ttl and info.bounded_by != "core" and info.ttl_by == "core":
        message = (
            f"nobody would keep to it: a tier of type {tier.type!r} does not end older blocks; leave it out"
        )
        yield (*path, "ttl"), message


def order_findings(
    enabled: list[str], unordered: list[str], lookup_order: tuple[str, ...] | None, tiers: Iterable[str]
) -> Iterator[Finding]:
    """Whether the enabled tiers have an order. *unordered* are those that no file puts in order."""
    path = ("lookup_order",)
    if lookup_order is None:
        if len(unordered) > 1:
            example = ", ".join(f'"{name}"' for name in enabled)
            names = ", ".join(unordered)
            order = f"[{example}] in a file, or {variable_for(path)}='[{example}]'"
            yield path, f"is required: no file gives the tiers {names} an order; set it, such as {order}"
        return
    for name in sorted(set(lookup_order) - set(tiers)):
        yield path, f"names {name!r}, which is not a configured tier (configured: {', '.join(sorted(tiers))})"
    for name in sorted({name for name in lookup_order if lookup_order.count(name) > 1}):
        yield path, f"names {name!r} twice"
    for name in enabled:
        if name not in lookup_order:
            yield path, f"leaves out the enabled tier {name!r}"


def blocklist_findings(names: Collection[str]) -> Iterator[Finding]:
    """What can't have been meant: a name of a tier type, policy or command in place of its distribution's.

    A name that is not installed is no problem (it may come and go), but is logged: it may be misspelt.
    """
    offers = find_offers("kvtier.")
    distributions = {normalized(offer.distribution) for offer in offers}
    for name in names:
        if normalized(name) in distributions:
            continue
        if homes := sorted({offer.distribution for offer in offers if offer.name == name}):
            text = f"{name!r} is no distribution but a name that {' and '.join(homes)} offers: block {homes[0]!r}"
            yield ("blocked_plugins",), text
        else:
            hint = did_you_mean(name, distributions)
            _log.warning("blocked_plugins: no plugin %r is installed%s", name, hint)
