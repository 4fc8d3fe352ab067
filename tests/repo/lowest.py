"""The lowest versions that our distributions allow of what they need: ``nox -s minimums`` installs these."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def lowest(paths: Sequence[Path], extras: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The lowest version that the distributions at *paths* allow of each of their dependencies, by name.

    With the *extras* of a path that ends so. Raises ``ValueError`` for a dependency without a lower bound.
    """
    found: dict[str, Version] = {}
    for path in paths:
        project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
        wanted = [extra for end, names in extras.items() if path.match(f"*/{end}") for extra in names]
        optional = [need for extra in wanted for need in project["optional-dependencies"][extra]]
        for requirement in map(Requirement, [*project["dependencies"], *optional]):
            if requirement.name == "kvtier" or requirement.name.startswith("kvtier-"):
                continue
            bounds = [Version(item.version) for item in requirement.specifier if item.operator == ">="]
            if not bounds:
                raise ValueError(f"{path}/pyproject.toml: {requirement} has no lower bound")
            found[requirement.name] = max(bounds[0], found.get(requirement.name, bounds[0]))
    return {name: str(version) for name, version in found.items()}
