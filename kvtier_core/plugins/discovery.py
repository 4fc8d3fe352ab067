"""Which plugins are installed: the entry points of kvtier's groups, read without importing any plugin.

This module decides what a name refers to. Only ``Offer.load`` imports a plugin. A distribution whose metadata is broken
is logged and left out. A distribution that is on the path twice counts once, the first time, as for ``import``. A
distribution that the setting ``blocked_plugins`` names counts as not installed, but messages say why.
"""

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from kvtier_core.errors import PluginError
from kvtier_core.masking import mask_text

CERTIFY_GROUP = "kvtier.certify.v1"
COMMAND_GROUP = "kvtier.commands.v1"
ENGINE_GROUP = "kvtier.engines.v1"
POLICY_GROUP = "kvtier.policies.v1"

_log = logging.getLogger("kvtier.plugins")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One distribution's offer of one name in one entry-point group."""

    name: str
    distribution: str
    version: str
    group: str
    blocked: bool
    entry_point: EntryPoint = field(repr=False, compare=False)

    @property
    def target(self) -> str:
        """``package.module:attribute``."""
        return self.entry_point.value

    @property
    def origin(self) -> str:
        """Distribution and version, as messages name a plugin."""
        return f"{self.distribution} {self.version}"

    def load(self, what: str) -> Any:  # noqa: ANN401 - whatever a third party put there
        """Import what the entry point names. Raises ``PluginError`` with distribution, version and cause."""
        try:
            return self.entry_point.load()
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{what} {self.name!r} of {self.origin} can't be imported from {self.target}: "
                f"{type(error).__name__}: {mask_text(str(error))}: update or uninstall {self.distribution}"
            ) from error


def normalized(distribution: str) -> str:
    """A distribution's name in the one spelling by which names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def find_offers(prefix: str, blocked: Collection[str] = ()) -> list[Offer]:
    """Every offer in groups that start with *prefix*, sorted by name and distribution.

    Offers of the distributions *blocked* (normalized names) are marked so, and are in the list all the same.
    Cost: reads the entry points of every installed distribution, a few milliseconds in all.
    """
    found: dict[str, list[Offer]] = {}
    for distribution in distributions():
        try:
            offers = _offers_of(distribution, prefix, blocked)
        except Exception as error:  # noqa: BLE001 - third-party metadata; it must harm only its own distribution
            where = getattr(distribution, "_path", "an unknown place")
            _log.warning("ignoring the broken metadata of a distribution at %s: %s", where, error)
            continue
        if offers:
            found.setdefault(normalized(offers[0].distribution), offers)
    offers = [offer for of_one in found.values() for offer in of_one]
    return sorted(offers, key=lambda offer: (offer.name, offer.distribution))


def _offers_of(distribution: Distribution, prefix: str, blocked: Collection[str]) -> list[Offer]:
    entry_points = [item for item in distribution.entry_points if item.group.startswith(prefix)]
    if not entry_points:
        return []
    name = distribution.metadata["Name"] or "(distribution without a name)"
    version = distribution.metadata["Version"] or "(no version)"
    is_blocked = normalized(name) in blocked
    return [
        Offer(
            name=item.name,
            group=item.group,
            distribution=name,
            version=version,
            blocked=is_blocked,
            entry_point=item,
        )
        for item in entry_points
    ]


def pick(offers: Sequence[Offer], name: str, what: str) -> Offer | None:
    """The one offer called *name*, or ``None``.

    Raises ``PluginError`` when several distributions offer it, or only blocked ones.
    """
    named = [offer for offer in offers if offer.name == name]
    matching = [offer for offer in named if not offer.blocked]
    if len(matching) > 1:
        origins = " and ".join(f"{offer.origin} ({offer.target})" for offer in matching)
        raise PluginError(
            f"{what} {name!r} is offered by {origins}: uninstall one of them, or name it in the setting blocked_plugins"
        )
    if named and not matching:
        origins = " and ".join(offer.origin for offer in named)
        raise PluginError(
            f"{what} {name!r} of {origins} is blocked by the setting blocked_plugins: take the distribution out of "
            f"that list, or use another {what}"
        )
    return matching[0] if matching else None


def usable_names(offers: Sequence[Offer]) -> set[str]:
    """The names that are not blocked."""
    return {offer.name for offer in offers if not offer.blocked}
