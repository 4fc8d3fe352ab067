"""The tutorial as its reader would use it: its files and its commands, in its order, by the marks in front of them.

What is marked as *shown* is a file that a command of the page has made.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs/tutorial/write-a-tier.md"
_FENCE = re.compile(r"(?:<!-- (?:test|(shown)): (\S+) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)


class Block(NamedTuple):
    """A block of code: a file by its name, or commands (``language`` is ``sh``)."""

    is_shown: str
    name: str
    language: str
    text: str


def blocks(page: Path = PAGE) -> list[Block]:
    """Every block of code of the page, in order; one without a mark has an empty name."""
    return [Block(*match.groups(default="")) for match in _FENCE.finditer(page.read_text())]


def files(page: Path = PAGE) -> dict[str, str]:
    """What the reader writes into files."""
    return {block.name: block.text for block in blocks(page) if _is_file(block)}


def shown(page: Path = PAGE) -> dict[str, str]:
    """What the page shows of files that its commands make."""
    return {block.name: block.text for block in blocks(page) if block.is_shown}


def _is_file(block: Block) -> bool:
    return bool(block.name) and not block.is_shown and block.language != "sh"


def script(*names: str, page: Path = PAGE) -> str:
    """A shell program that does what the page says, in its order; of the commands only those called *names*."""
    return "\n".join(["set -euo pipefail", *_steps(names, page)])


def _steps(names: tuple[str, ...], page: Path) -> Iterator[str]:
    for block in blocks(page):
        if block.language == "sh" and block.name in names:
            yield f"echo '=== {block.name}'\n{block.text}"
        elif _is_file(block):
            yield f"cat > {block.name} <<'END OF FILE'\n{block.text}END OF FILE"
