"""C35 in an engine: a tier that takes longer than computing is passed over, once both times are known."""

from functools import partial

import pytest

from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.engine import PrefillCost
from kvtier_transformers.engine import Engine
from tests.transformers.tiny import BLOCK, tiny_model, tokens

PROMPT = 10 * BLOCK
PROMPTS = 6


def test_the_cost_is_the_median_of_the_last_long_prompts():
    cost = PrefillCost()
    for num_tokens, seconds in [(1000, 50.0), (1000, 1.0)]:
        cost.add(num_tokens, seconds)
    assert cost.seconds_per_token() is None
    cost.add(10, 5.0)  # too short to tell
    assert cost.seconds_per_token() is None
    cost.add(2000, 2.0)
    assert cost.seconds_per_token() == pytest.approx(0.001)
    for _ in range(8):
        cost.add(1000, 4.0)
    assert cost.seconds_per_token() == pytest.approx(0.004)


@pytest.mark.parametrize(("latency", "is_passed_over"), [("200ms", True), ("0s", False)])
def test_c35_a_tier_slower_than_computing_is_passed_over(tmp_path, monkeypatch, latency, is_passed_over):
    unlikely = partial(PoolLimits, break_even_margin=5.0, break_even_probe_s=3600.0)
    monkeypatch.setattr("kvtier_core.runtime.PoolLimits", unlikely)
    settings = tmp_path / "kvtier.toml"
    settings.write_text(
        f"""
        [pool]
        capacity = "640KiB"  # fewer rows than the prompts have blocks
        block_size = {BLOCK}
        [tiers.slow]
        type = "memory"
        latency = "{latency}"
        """
    )
    model = tiny_model()
    prompts = [tokens(PROMPT, seed=seed) for seed in range(PROMPTS)]
    with Engine.open(model, config=settings, max_tokens=PROMPT + 8, name="tiny") as engine:
        computed = [engine.generate(prompt, max_tokens=2).token_ids for prompt in prompts]
        assert engine.flush(60)
        for _ in range(2):
            again = [engine.generate(prompt, max_tokens=2).token_ids for prompt in prompts]
            assert again == computed
        stats = engine.stats()
    assert stats["hit_tokens"]["slow"] > 0
    assert (stats["misses"].get("break_even", 0) > 0) == is_passed_over
