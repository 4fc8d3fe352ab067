# ruff: noqa: INP001 - no module of a package
"""Sphinx: the pages of the repository as a site. ``nox -s docs`` builds it, with warnings as errors.

The source directory is the repository's root, because pages link to the READMEs of the packages.
"""

project = "kvtier"
copyright = "the kvtier authors, Apache-2.0"  # noqa: A001 - Sphinx calls it so
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**",
    "plugins/*/*.md",
    "examples/*/*.md",
]
myst_heading_anchors = 5
suppress_warnings = ["misc.highlighting_failure"]  # examples in JSON Lines, and output with "..." in it
html_theme = "furo"
html_title = "kvtier"
