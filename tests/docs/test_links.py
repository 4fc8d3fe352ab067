"""Every page can be found from the README, and no link leads nowhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PAGES = ["*.md", "docs/**/*.md", "plugins/*/*.md", "examples/**/*.md"]
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def pages() -> list[Path]:
    """All pages that belong to the repository."""
    return sorted(page for pattern in _PAGES for page in ROOT.glob(pattern))


def links(page: Path) -> set[Path]:
    """What a page links to in the repository."""
    found = _LINK.findall(page.read_text())
    return {(page.parent / link).resolve() for link in found if "://" not in link}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_leads_nowhere(page: Path) -> None:
    assert [str(target) for target in links(page) if not target.exists()] == []


def test_every_page_of_the_docs_is_linked_from_the_readme() -> None:
    linked = links(ROOT / "README.md")
    wanted = [
        page for page in pages() if page.is_relative_to(ROOT / "docs") or page.parent.parent.name == "plugins"
    ]
    missing = [
        str(page.relative_to(ROOT)) for page in wanted if page not in linked and page.name != "CHANGELOG.md"
    ]
    assert missing == []
