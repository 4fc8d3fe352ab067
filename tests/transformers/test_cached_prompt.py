"""What a caller's own model run left in the cache is stored only where it is the KV of the tokens handed over."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtier_transformers.compat import cache_keyword
from kvtier_transformers.engine import Engine
from kvtier_transformers.errors import CacheError
from tests.transformers.tiny import save_model, tiny_model, tokens, write_settings

PROMPT = [*tokens(60), *tokens(40)]  # its end is its beginning: prompt lookup finds candidates
IDS = torch.tensor([PROMPT])
OPTIONS = {"max_new_tokens": 50, "do_sample": False, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = save_model(tiny_model(), tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)


@pytest.fixture
def engine(model, tmp_path):
    with Engine.open(model, config=write_settings(tmp_path), max_tokens=400) as opened:
        yield opened


def keyword(model, prompt):
    return {cache_keyword(model): prompt.cache}


def fill(engine):
    engine.generate(PROMPT, max_tokens=1)


def is_right(engine, model, sequence):
    """What the engine has of the sequence gives the model's own answer."""
    generation = engine.generate(sequence, max_tokens=1)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([sequence])).logits[0, -1]
    torch.testing.assert_close(generation.first_logits, expected, atol=1e-4, rtol=1e-4)
    return generation.hit_tokens


ASSISTED = {
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 5},
    "draft model": lambda: {"assistant_model": tiny_model(seed=0)},
    "use_cache=False": lambda: {"use_cache": False},
}


@pytest.mark.parametrize("way", ASSISTED)
def test_r2_generation_that_feeds_the_loaded_tokens_again_is_refused(engine, model, way):
    fill(engine)
    expected = model.generate(IDS, **OPTIONS)
    with engine.cache_for(IDS) as prompt:
        assert prompt.hit_tokens == 96
        with pytest.raises(CacheError, match=r"holds \d+ tokens.*positions"):
            model.generate(IDS, **OPTIONS, **ASSISTED[way](), **keyword(model, prompt))
        prompt.store(expected)  # what it holds, which is right
    assert is_right(engine, model, [*expected[0].tolist(), 5]) == 96


@pytest.mark.parametrize("way", ["prompt lookup", "draft model"])
def test_r2_assisted_generation_that_begins_with_nothing_loaded_is_right(engine, model, way):
    expected = model.generate(IDS, **OPTIONS)
    with engine.cache_for(IDS) as prompt:
        output = model.generate(IDS, **OPTIONS, **ASSISTED[way](), **keyword(model, prompt))
        prompt.store(output)
    assert output.tolist() == expected.tolist()
    assert is_right(engine, model, [*output[0].tolist(), 5]) == 144


def run(model, prompt, ids, **more):
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), **keyword(model, prompt), **more)


def test_r2_a_cache_longer_than_the_sequence_is_not_stored(engine, model):
    with engine.cache_for(PROMPT) as prompt:
        run(model, prompt, [*PROMPT, 1, 2, 3])
        with pytest.raises(CacheError, match="holds 103 tokens, the sequence to store has 100"):
            prompt.store(PROMPT)
        prompt.cache.crop(-3)
        prompt.store(PROMPT)
    assert is_right(engine, model, PROMPT) == 96


def test_r2_the_prompt_fed_as_a_whole_behind_what_is_loaded_is_not_stored(engine, model):
    fill(engine)
    with engine.cache_for(PROMPT) as prompt:
        run(model, prompt, PROMPT)
        with pytest.raises(CacheError, match="position 96"):
            prompt.store([*PROMPT, *PROMPT])
    assert is_right(engine, model, [*PROMPT, *PROMPT]) == 96


def test_r2_other_tokens_than_those_that_were_computed_are_not_stored(engine, model):
    with engine.cache_for(PROMPT[:50]) as prompt:
        run(model, prompt, [*PROMPT[:50], *tokens(50, seed=7)])
        with pytest.raises(CacheError, match="position 50"):
            prompt.store(PROMPT)
    assert is_right(engine, model, PROMPT) == 0


def test_r2_tokens_taken_back_and_replaced_are_those_that_count(engine, model):
    other = [*PROMPT[:60], *tokens(40, seed=7)]
    with engine.cache_for(PROMPT[:50]) as prompt:
        run(model, prompt, PROMPT)
        prompt.cache.crop(-40)
        run(model, prompt, other[60:])
        with pytest.raises(CacheError, match="position 60"):
            prompt.store(PROMPT)
        prompt.store(other)
    assert is_right(engine, model, other) == 96
    assert is_right(engine, model, PROMPT) == 48


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"position_ids": torch.arange(1, 101)[None]}, "position"),
        ({"position_ids": torch.arange(0, 200, 2)[None]}, "position"),
        ({"attention_mask": torch.tensor([[0] * 10 + [1] * 90])}, "attention_mask"),
        ({"attention_mask": torch.zeros(1, 1, 100, 100)}, "attention_mask"),
    ],
)
def test_r2_positions_and_masks_of_ones_own_are_refused(engine, model, more, words):
    with engine.cache_for(PROMPT) as prompt:
        with pytest.raises(CacheError, match=words):
            run(model, prompt, PROMPT, **more)
        prompt.store(PROMPT)
    assert is_right(engine, model, PROMPT) == 0


def test_r2_embeddings_instead_of_tokens_are_refused(engine, model):
    with engine.cache_for(PROMPT) as prompt, torch.no_grad():
        embeddings = model.get_input_embeddings()(torch.tensor([tokens(100, seed=3)]))
        with pytest.raises(CacheError, match="inputs_embeds"):
            model(inputs_embeds=embeddings, **keyword(model, prompt))
    assert is_right(engine, model, PROMPT) == 0


def test_r2_another_model_over_the_same_cache_is_refused(engine, model):
    with engine.cache_for(PROMPT) as prompt:
        with pytest.raises(CacheError, match="past the model"):
            run(tiny_model(seed=4), prompt, PROMPT)
        run(model, prompt, PROMPT)
        prompt.store(PROMPT)
    assert is_right(engine, model, PROMPT) == 96


def test_r2_a_batch_is_not_stored_as_one_sequence(engine, model):
    with engine.cache_for(PROMPT) as prompt:
        run(model, prompt, PROMPT)
        with pytest.raises(CacheError, match="2 sequences"):
            prompt.store(torch.tensor([PROMPT, PROMPT]))


def test_r2_the_inner_model_may_be_called_by_position(engine, model):
    with engine.cache_for(PROMPT) as prompt, torch.no_grad():
        model.model(IDS, torch.ones_like(IDS), torch.arange(100)[None], prompt.cache)
        prompt.store(PROMPT)
    assert is_right(engine, model, PROMPT) == 96


def test_r2_the_model_is_as_before_once_the_cache_is_over(engine, model):
    with engine.cache_for(PROMPT) as prompt:
        run(model, prompt, PROMPT)
    assert not model.base_model._forward_pre_hooks
    with torch.no_grad():
        model(inputs_embeds=torch.zeros(1, 4, 64))
