"""Imports what an entry point names; whatever that raises becomes a ``PluginError`` that says whose fault it is."""

from typing import Any

from kvtier_core.errors import PluginError
from kvtier_core.masking import mask_text
from kvtier_core.plugins.discovery import Offer


def import_target(offer: Offer, what: str) -> Any:  # noqa: ANN401 - whatever a third party put there
    """Import what an entry point names. Raises ``PluginError`` with distribution, version and cause."""
    try:
        return offer.entry_point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{what} {offer.name!r} of {offer.origin} can't be imported from {offer.target}: "
            f"{type(error).__name__}: {mask_text(str(error))}: update or uninstall {offer.distribution}"
        ) from error
