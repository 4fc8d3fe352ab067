"""``python -m tests.llamacpp.ask_program MODEL CONFIG TOKENS LOGITS``: one prompt in a process of its own.

The prompt has so many tokens of Python's manual. Writes the first logits to LOGITS (.npy) and prints what was restored.
"""

import json
import sys
from pathlib import Path

import numpy as np

from kvtier_llamacpp import Engine
from tests.llamacpp.prompts import manual


def main(model: str, config: str, num_tokens: str, logits: str) -> None:
    """Ask, and wait for the tiers."""
    with Engine.open(Path(model), max_tokens=int(num_tokens) + 8, config=Path(config), threads=2) as engine:
        found = engine.generate(manual(engine, int(num_tokens)), max_tokens=8)
        assert engine.flush()
    np.save(logits, found.first_logits)
    print(json.dumps({"token_ids": found.token_ids, "hits": dict(found.hits_by_tier)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
