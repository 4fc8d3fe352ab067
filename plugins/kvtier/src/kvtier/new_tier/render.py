"""Which files a new tier's package has, and what is in them. Writes nothing."""

import re
from collections.abc import Mapping
from importlib.resources import files

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
LICENCES: Mapping[str, tuple[str, str] | None] = {
    "apache": ("Apache-2.0", "licence_apache.in"),
    "mit": ("MIT", "licence_mit.in"),
    "none": None,
}
"""What may be chosen: its SPDX name, and the template of its text."""


def is_name(name: str) -> bool:
    """Whether a tier type can have this name: lower case letters and digits with single underscores between."""
    return _NAME.fullmatch(name) is not None


def distribution_of(name: str) -> str:
    """What the package of the tier type is called."""
    return f"kvtier-{name.replace('_', '-')}"


def render(name: str, *, hooks: bool, licence: str) -> dict[str, str]:
    """The text of each file by its path, for a tier type called *name*."""
    tier = "hooks_tier.py.in" if hooks else "blocking_tier.py.in"
    wanted = {
        "pyproject.toml": "pyproject.toml.in",
        "README.md": "readme.md.in",
        f"src/kvtier_{name}/__init__.py": "init.py.in",
        f"src/kvtier_{name}/tier.py": tier,
        f"tests/test_{name}.py": "test.py.in",
        ".github/workflows/tests.yml": "ci.yml.in",
    }
    chosen = LICENCES[licence]
    if chosen is not None:
        wanted["LICENSE"] = chosen[1]
    rendered = {path: _named(name, _read(template)) for path, template in wanted.items()}
    rendered[f"src/kvtier_{name}/py.typed"] = ""
    if chosen is not None:
        readme = 'readme = "README.md"\n'
        said = f'{readme}license = "{chosen[0]}"\nlicense-files = ["LICENSE"]\n'
        rendered["pyproject.toml"] = rendered["pyproject.toml"].replace(readme, said)
    return rendered


def _read(template: str) -> str:
    return files("kvtier.new_tier").joinpath("templates", template).read_text(encoding="utf-8")


def _named(name: str, text: str) -> str:
    """The templates are a working tier called shelf: another name takes its place."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    text = text.replace("kvtier-shelf", distribution_of(name))
    return text.replace("shelf", name).replace("Shelf", class_name)
