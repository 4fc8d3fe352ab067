"""Commands that plugins add to the ``kvtier`` command line (entry-point group ``kvtier.commands.v1``).

A target is a module or an object with ``help: str``, ``add_arguments(parser)`` and ``run(args) -> int``. Only the
chosen command's plugin is imported.
"""

import argparse
from collections.abc import Collection
from typing import Protocol

from kvtier_core.errors import PluginError
from kvtier_core.plugins.discovery import COMMAND_GROUP, Offer, find_offers, pick, usable_names
from kvtier_core.suggest import did_you_mean

_OUR_DISTRIBUTIONS = {
    "bench": "kvtier-testing",
    "check": "kvtier-testing",
    "demo": "kvtier-transformers",
}


class Command(Protocol):
    """What a command's entry point names."""

    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the exit status. Raise ``KvtierError`` for what the user should read."""
        ...


def _offers(blocked: Collection[str]) -> list[Offer]:
    return [offer for offer in find_offers(COMMAND_GROUP, blocked) if offer.group == COMMAND_GROUP]


def list_commands(blocked: Collection[str] = ()) -> dict[str, str]:
    """Command names and the distributions that offer them, without importing any; those of *blocked* left out."""
    return {offer.name: offer.distribution for offer in _offers(blocked) if not offer.blocked}


def load_command(name: str, own_commands: tuple[str, ...] = (), blocked: Collection[str] = ()) -> Command:
    """Import one command. Raises ``PluginError`` when it is unknown, blocked, ambiguous, broken or lacks a member.

    *own_commands* are only named in the message, as what may have been meant. *blocked* are normalized names of
    distributions.
    """
    offers = _offers(blocked)
    offer = pick(offers, name, "command")
    if offer is None:
        if name in _OUR_DISTRIBUTIONS:
            raise PluginError(f"command {name!r} is not installed: pip install {_OUR_DISTRIBUTIONS[name]}")
        known = usable_names(offers) | set(own_commands) | set(_OUR_DISTRIBUTIONS)
        raise PluginError(f"unknown command {name!r}{did_you_mean(name, known)} (kvtier --help lists all)")
    target = offer.load("command")
    command: Command = target
    missing = [item for item in ("add_arguments", "run") if not callable(getattr(target, item, None))]
    if not isinstance(getattr(target, "help", None), str):
        missing.insert(0, "help")
    if missing:
        raise PluginError(f"command {name!r} of {offer.origin} ({offer.target}) lacks {', '.join(missing)}")
    return command
