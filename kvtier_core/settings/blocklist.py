"""The setting ``blocked_plugins``: read before all others, because it decides which plugins may be imported at all.

Decides which distributions count as not installed. Whether the value is well formed is told with all other problems
when the settings are validated; until then a malformed list blocks nothing, and nothing starts with it either.
"""

import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from kvtier_core.errors import ConfigError
from kvtier_core.plugins.discovery import find_offers, normalized
from kvtier_core.settings.layers import Layers, read_layers
from kvtier_core.suggest import did_you_mean

SETTING = ("blocked_plugins",)

_NAMES = TypeAdapter(tuple[str, ...])
_log = logging.getLogger("kvtier.settings")


def blocked_in(layers: Layers) -> frozenset[str] | None:
    """The normalized names of blocked distributions, or ``None`` where the value is malformed."""
    value = layers.peek(SETTING)
    try:
        names = _NAMES.validate_json(value) if isinstance(value, str) else _NAMES.validate_python(value or ())
    except ValidationError:
        return None
    return frozenset(normalized(name) for name in names)


def read_blocklist(file: Path | None = None) -> frozenset[str]:
    """The blocked distributions of a configuration, for tools that need nothing else of it.

    *file* and the environment are read as ``load_settings`` reads them. Raises ``ConfigError`` when the file can't be
    read or the value is malformed.
    """
    blocked = blocked_in(read_layers(file, None, os.environ))
    if blocked is None:
        raise ConfigError('blocked_plugins: must be a list of distributions, such as ["kvtier-disk"]')
    return blocked


def findings(names: Collection[str]) -> Iterator[str]:
    """What can't have been meant: a name of a tier type, policy or command in place of its distribution's.

    A name that is not installed is no problem (it may come and go), but is logged: it may be misspelt.
    """
    offers = find_offers("kvtier.")
    distributions = {normalized(offer.distribution) for offer in offers}
    for name in names:
        if normalized(name) in distributions:
            continue
        homes = sorted({offer.distribution for offer in offers if offer.name == name})
        if homes:
            yield f"{name!r} is no distribution but a name that {' and '.join(homes)} offers: block {homes[0]!r}"
        else:
            _log.warning(
                "blocked_plugins: no plugin %r is installed%s", name, did_you_mean(name, distributions)
            )
