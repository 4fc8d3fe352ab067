"""``kvtier new-tier NAME``: writes the package of a new tier type, which can be installed and passes its tests."""

import argparse
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvtier.new_tier.render import LICENCES, distribution_of, is_name, render
from kvtier_core.errors import ConfigError
from kvtier_core.hookspecs import TIER_GROUP
from kvtier_core.plugins.discovery import find_offers

help = "Write a package for a new tier type: a tier that works, its tests, and all that a distribution needs."  # noqa: A001 - the command protocol


def _name(text: str) -> str:
    if not is_name(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name for a tier type: use lower case letters and digits with single underscores between, "
            'such as "my_store"'
        )
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", type=_name, metavar="NAME", help="the tier type, as a configuration names it")
    parser.add_argument(
        "--hooks", action="store_true", help="on the hook specs, for storage whose client takes jobs"
    )
    parser.add_argument("--licence", choices=sorted(LICENCES), default="apache", help="(default apache)")
    parser.add_argument(
        "--into",
        type=Path,
        default=Path(),
        metavar="DIRECTORY",
        help="where the package goes (default: here)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the files. Raises ``ConfigError`` when there is something of that name already."""
    _check_free(args.name)
    place: Path = args.into / distribution_of(args.name)
    try:
        place.mkdir(parents=True)
        for path, text in render(args.name, hooks=args.hooks, licence=args.licence).items():
            file = place / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise ConfigError(
            f"{place} is there already: choose another name, or another place with --into"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"can't write {place}: {error.strerror}; choose another place with --into"
        ) from error
    print(f"{place} has a tier that works. Next: cd {place}; pip install --editable .; python -m pytest")
    return 0


def _check_free(name: str) -> None:
    """Refuse a name with which the new package would take another's place when it is installed."""
    named = [offer.origin for offer in find_offers(TIER_GROUP) if offer.name == name]
    if named:
        raise ConfigError(
            f"a tier type {name!r} of {named[0]} is installed already, and it would be offered twice: choose "
            "another name"
        )
    distribution = distribution_of(name)
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return
    raise ConfigError(
        f"{distribution} {found} is installed already, and it would be replaced: choose another name"
    )
