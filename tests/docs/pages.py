"""Pages that are made from the code: compared with what is in the repository, or written anew with UPDATE_DOCS=1."""

import os
from pathlib import Path

UPDATE = os.environ.get("UPDATE_DOCS") == "1"


def update_or_compare(page: Path, text: str) -> None:
    """Write *text* when an update was asked for; else fail unless it is what *page* has."""
    if UPDATE:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
    else:
        assert page.read_text() == text, f"{page.name} is out of date: run UPDATE_DOCS=1 pytest tests/docs"
