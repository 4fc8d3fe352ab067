"""SmolLM2 in a real SGLang: a long prompt goes on as it did, whether its pages come from the device or from disk."""

import time
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.sglang.engines import PAGE, Engine, needs_sglang

pytestmark = [needs_sglang, pytest.mark.real_model, pytest.mark.timeout(1500)]
TOKENS = 1000
PAGES = (TOKENS - 1) // PAGE
"""Those of the prompt that can be restored: one token is always computed."""
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def tokenizer():
    from kvtier_transformers.gguf import GGUFFile
    from kvtier_transformers.models import find_smollm2
    from kvtier_transformers.tokenizer import load_gguf_tokenizer

    return load_gguf_tokenizer(GGUFFile(find_smollm2()))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "kvtier.toml"
    tier = f'[tiers.disk]\ntype = "disk"\nroot = "{tmp_path}/blocks"\ncapacity = "256MiB"\nmin_free = 0\n'
    file.write_text(f'on_reset = "pool"\n[pool]\ncapacity = "128MiB"\n{tier}')
    return file


def test_smollm2_says_the_same_from_its_own_cache_from_disk_and_in_a_new_process(
    smollm2, tokenizer, config, tmp_path
):
    prompt = tokenizer.encode(topics["assignment"])[:TOKENS]
    assert len(prompt) == TOKENS

    def ask(engine: Engine) -> tuple[str, int, dict[str, int]]:
        """The text, the cached pages, and the pages that kvtier has loaded for it, by source."""
        before = engine.figures()["hit_blocks"]  # at the start, the self-test's
        [answer] = engine.ask(prompt, tokens=24)
        after = engine.figures()["hit_blocks"].items()
        hits = {source: count - before.get(source, 0) for source, count in after}
        loaded = {source: count for source, count in hits.items() if count}
        return tokenizer.decode(answer.tokens), answer.cached // PAGE, loaded

    engine = Engine(smollm2, tmp_path / "first.log", config=config)
    try:
        text, *cold = ask(engine)
        assert len(set(text.split())) > 3, text
        assert cold == [0, {}]
        assert ask(engine) == (text, PAGES, {})
        deadline = time.monotonic() + PATIENCE_S
        while not (figures := engine.figures())["is_settled"]:
            assert time.monotonic() < deadline, figures
            time.sleep(0.1)
        engine.flush()
        assert ask(engine) == (text, PAGES, {"disk": PAGES})
    finally:
        engine.close()
    engine = Engine(smollm2, tmp_path / "second.log", config=config)
    try:
        assert ask(engine) == (text, PAGES, {"disk": PAGES})
    finally:
        engine.close()
