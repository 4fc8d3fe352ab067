"""Prompts whose blocks a tier keeps, asked of a real SGLang."""

import time
from pathlib import Path

from tests.sglang.engines import PAGE, Answer, Engine, prompt

LONG = 400
WHOLE = (LONG - 1) // PAGE * PAGE
"""The tokens of a prompt of LONG that can be restored."""
BLOCKS = LONG // PAGE
PATIENCE_S = 120.0


def count_blocks(root: Path) -> int:
    """The blocks in a tier that keeps each in a file."""
    return sum(file.stat().st_size > 4096 for file in root.rglob("*") if file.is_file())


def store(engine: Engine, root: Path, name: str, *, files: int = BLOCKS) -> Answer:
    """Ask a prompt for the first time, and wait until the tier has it."""
    before = count_blocks(root)
    [answer] = engine.ask(prompt(name, LONG))
    assert answer.cached == 0
    deadline = time.monotonic() + PATIENCE_S
    while count_blocks(root) < before + files:
        assert time.monotonic() < deadline, f"{count_blocks(root) - before} of {files} blocks were stored"
        time.sleep(0.05)
    return answer


def restore(engine: Engine, name: str) -> Answer:
    """Ask a prompt again, with nothing in SGLang's cache and the pool, until a tier answers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        engine.flush()
        [answer] = engine.ask(prompt(name, LONG))
        if answer.cached == WHOLE:
            return answer
        assert time.monotonic() < deadline, f"{answer.cached} of {WHOLE} tokens were restored"
