"""Hints reach the pool and the tiers, and change no answer."""

import pytest
import torch

from kvtier_core.engine import Hints
from kvtier_transformers import Engine
from tests.transformers.tiny import BLOCK, tiny_model, tokens, write_settings

PROMPT = tokens(2 * BLOCK + 1)
OTHERS = [tokens(6 * BLOCK + 1, seed=seed) for seed in range(1, 9)]


@pytest.fixture
def engine(tmp_path):
    settings = write_settings(tmp_path, capacity="384KiB")  # 32 rows of 12 KiB; the others have 48 blocks
    with Engine.open(tiny_model(), config=settings, max_tokens=128, name="tiny") as opened:
        yield opened


@pytest.mark.parametrize(
    ("hints", "source"),
    [(Hints(), "disk"), (Hints(pin_s=600), "pool"), (Hints(retain_s=600, priority=50), "pool")],
)
def test_hinted_blocks_stay_in_the_pool(engine, hints, source):
    computed = engine.generate(PROMPT, max_tokens=2, hints=hints)
    for other in OTHERS:
        engine.generate(other, max_tokens=1)
        assert engine.flush(60)
    again = engine.generate(PROMPT, max_tokens=2)
    assert again.hits_by_tier == {source: 2 * BLOCK}
    assert again.token_ids == computed.token_ids


def test_what_is_to_be_dropped_is_stored_nowhere(engine):
    computed = engine.generate(PROMPT, max_tokens=2, hints=Hints(drop=True))
    assert engine.flush(60)
    again = engine.generate(PROMPT, max_tokens=2)
    assert again.hit_tokens == 0
    assert again.token_ids == computed.token_ids


def test_an_empty_use_of_a_cache_prefetches(engine):
    computed = engine.generate(PROMPT, max_tokens=2)
    for other in OTHERS:
        engine.generate(other, max_tokens=1)
        assert engine.flush(60)
    with engine.cache_for(PROMPT, hints=Hints(prefetch=True)) as prompt:
        assert prompt.hit_tokens == 2 * BLOCK
    again = engine.generate(PROMPT, max_tokens=2)
    assert again.hits_by_tier == {"pool": 2 * BLOCK}
    assert again.token_ids == computed.token_ids
    assert engine.stats()["hints"]["prefetch"] == 1


def test_hints_are_for_every_sequence_of_a_batch(engine):
    batch = torch.tensor([PROMPT, tokens(2 * BLOCK + 1, seed=99)])
    with engine.cache_for(batch, hints=Hints(pin_s=600)):
        pass
    assert engine.stats()["hints"]["pin"] == 2
