"""Batches: each sequence comes back by itself, and the answers are those without kvtier."""

import pytest
import torch

from kvtier_core import PoolError, UnsupportedModelError
from kvtier_transformers import Engine
from kvtier_transformers.compat import cache_keyword
from kvtier_transformers.errors import CacheError
from tests.transformers.tiny import BLOCK, save_model, tiny_model, tokens, write_settings

NEW = 12
PAD = 0
DOCUMENT = tokens(96)
QUESTIONS = [tokens(count, seed=seed) for seed, count in enumerate((4, 21, 9), start=1)]
PROMPTS = [[*DOCUMENT, *question] for question in QUESTIONS]
WIDTH = max(map(len, PROMPTS))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    directory = save_model(tiny_model(), tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)


@pytest.fixture
def opened(model, tmp_path):
    def opened(model=model, **options):
        return Engine.open(model, config=write_settings(tmp_path), **{"max_tokens": 200, **options})

    return opened


def pad(prompts, side="left"):
    """Ids and mask, as a tokenizer makes them."""
    width = max(map(len, prompts))
    rows = [[PAD] * (width - len(prompt)) for prompt in prompts]
    ids = [[*row, *p] if side == "left" else [*p, *row] for row, p in zip(rows, prompts, strict=True)]
    masks = [
        [0] * len(row) + [1] * len(p) if side == "left" else [1] * len(p) + [0] * len(row)
        for row, p in zip(rows, prompts, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(masks)


def generate(model, ids, mask, prompt=None, **options):
    cache = {} if prompt is None else {cache_keyword(model): prompt.cache}
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **options}
    return model.generate(ids, attention_mask=mask, **given, **cache)


def run(engine, model, prompts, side="left", **options):
    """What the batch becomes with kvtier, and how many columns were there before it ran."""
    ids, mask = pad(prompts, side)
    with engine.cache_for(ids, attention_mask=mask) as prompt:
        output = generate(model, ids, mask, prompt, **options)
        prompt.store(output)
    assert output.tolist() == generate(model, ids, mask, **options).tolist()
    return prompt.hit_tokens


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.filterwarnings("ignore:.*right-padding was detected")
def test_c40_a_batch_is_restored_from_the_pool_and_from_disk(model, opened, side):
    # On the left the third prompt has 12 columns of padding, and 6 blocks behind them.
    with opened() as engine:
        assert run(engine, model, PROMPTS, side) == 0
        assert run(engine, model, PROMPTS, side) == (108 if side == "left" else 96)
        assert engine.flush(60)
    with opened() as engine:
        assert run(engine, model, PROMPTS, side) == (108 if side == "left" else 96)
        assert engine.stats()["hit_tokens"]["disk"] > 0


def test_c40_each_sequence_is_found_by_itself_and_in_any_batch(model, opened):
    with opened() as engine:
        for prompt in PROMPTS:
            engine.generate(prompt, max_tokens=2)
        assert run(engine, model, PROMPTS) == 108
        assert run(engine, model, [PROMPTS[1], PROMPTS[0]]) == 112
        assert run(engine, model, [PROMPTS[2], tokens(40, seed=9)]) == 105 - 40  # all of that is padding
        assert run(engine, model, [PROMPTS[0], tokens(100, seed=8)]) == 0
        for prompt in (tokens(100, seed=8), tokens(40, seed=9)):
            assert engine.generate(prompt, max_tokens=2).hit_tokens == (len(prompt) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.filterwarnings("ignore:.*right-padding was detected")
def test_c40_one_padded_sequence(model, opened, side):
    ids, mask = pad([DOCUMENT, tokens(101)], side)
    with opened() as engine:
        for hits in (5, 85) if side == "left" else (0, 80):  # padding on the left needs no computing
            with engine.cache_for(ids[:1], attention_mask=mask[:1]) as prompt:
                assert prompt.hit_tokens == hits
                output = generate(model, ids[:1], mask[:1], prompt)
                prompt.store(output)
            assert output.tolist() == generate(model, ids[:1], mask[:1]).tolist()


def test_c40_what_a_batch_generated_is_kept(model, opened):
    ids, mask = pad(PROMPTS)
    with opened() as engine:
        with engine.cache_for(ids, attention_mask=mask) as prompt:
            output = generate(model, ids, mask, prompt, min_new_tokens=40, max_new_tokens=40)
            prompt.store(output)
        for row, question in zip(output.tolist(), PROMPTS, strict=True):
            sequence = [*row[WIDTH - len(question) :], 5]
            generation = engine.generate(sequence, max_tokens=1)
            assert generation.hit_tokens == (len(sequence) - 2) // BLOCK * BLOCK
            with torch.no_grad():
                expected = model(input_ids=torch.tensor([sequence])).logits[0, -1]
            torch.testing.assert_close(generation.first_logits, expected, atol=1e-4, rtol=1e-4)


def test_c40_padding_behind_a_sequence_that_ended_first_is_not_kept(model, opened):
    ids, mask = pad(PROMPTS)
    end = int(generate(model, ids, mask)[0, WIDTH + 2])
    with opened() as engine:
        with engine.cache_for(ids, attention_mask=mask) as prompt:
            output = generate(model, ids, mask, prompt, max_new_tokens=60, eos_token_id=end)
            ended = output[0].tolist()
            assert ended[-40:] == [PAD] * 40, "it ended early, and another did not"
            prompt.store(output)
        sequence = ended[WIDTH - len(PROMPTS[0]) :]
        assert engine.generate(sequence, max_tokens=1).hit_tokens == 96


def test_c40_a_window_shorter_than_the_prompts(opened):
    from transformers import MistralConfig, MistralForCausalLM

    from tests.transformers.tiny import SIZES

    torch.manual_seed(0)
    windowed = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24)).eval()
    with opened(windowed) as engine:
        assert [run(engine, windowed, PROMPTS) for _ in range(2)] == [0, 108]


def test_c40_forward_over_a_batch(model, opened):
    ids, mask = pad(PROMPTS)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
    with opened() as engine:
        for hits in (0, 108):
            with torch.no_grad(), engine.cache_for(ids, attention_mask=mask) as prompt:
                new = slice(prompt.hit_tokens, None)
                given = {"position_ids": positions[:, new], cache_keyword(model): prompt.cache}
                found = model(input_ids=ids[:, new], attention_mask=mask, **given).logits[:, -1]
                prompt.store(ids)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            assert prompt.hit_tokens == hits


def test_c41_a_second_store_of_a_batch_goes_on_where_the_first_ended(model, opened):
    ids, mask = pad(PROMPTS)
    with opened() as engine:
        with engine.cache_for(ids, attention_mask=mask) as prompt:
            first = generate(model, ids, mask, prompt, min_new_tokens=10, max_new_tokens=10)
            prompt.store(first)
            longer = torch.cat([mask, mask.new_ones(3, 10)], dim=-1)
            second = generate(model, first, longer, prompt, min_new_tokens=20, max_new_tokens=20)
            prompt.store(second)
        for row, question in zip(second.tolist(), PROMPTS, strict=True):
            sequence = row[WIDTH - len(question) :]
            hits = engine.generate(sequence, max_tokens=1).hit_tokens
            assert hits == (len(sequence) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda given: given.pop("position_ids"), "without position_ids"),
        (lambda given: given.update(position_ids=torch.arange(WIDTH)[None]), "position_ids says otherwise"),
        (lambda given: given.pop("attention_mask"), "attention_mask"),
        (lambda given: given["attention_mask"].fill_(1), "attention_mask"),
        (lambda given: given["attention_mask"][1].fill_(0), "attention_mask"),
        (lambda given: given.update(input_ids=given["input_ids"][:2]), "made for 3"),
    ],
)
def test_r2_c40_a_forward_pass_that_takes_padding_otherwise_is_refused(model, opened, change, problem):
    ids, mask = pad(PROMPTS)
    given = {
        "input_ids": ids,
        "attention_mask": mask.clone(),
        "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
    }
    change(given)
    with (
        opened() as engine,
        pytest.raises(CacheError, match=problem),
        torch.no_grad(),
        engine.cache_for(ids, attention_mask=mask) as prompt,
    ):
        model(**given, **{cache_keyword(model): prompt.cache})


def test_r2_c40_other_tokens_than_went_through_the_model_are_not_stored(model, opened):
    ids, mask = pad(PROMPTS)
    with opened() as engine, engine.cache_for(ids, attention_mask=mask) as prompt:
        output = generate(model, ids, mask, prompt)
        for row, column, problem in (
            (2, 50, "sequence 2 .* begin with the prompt"),
            (1, WIDTH + 2, "position"),
        ):
            other = output.clone()
            other[row, column] += 1
            with pytest.raises(CacheError, match=problem):
                prompt.store(other)
        with pytest.raises(CacheError, match="2 sequences to store"):
            prompt.store(output[:2])
        prompt.store(output)


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (torch.tensor([[1, 1, 0, 1, 1]] * 2), "in the middle of prompt 0"),
        (torch.tensor([[1] * 5, [0] * 5]), "prompt is empty"),
        (torch.ones(2, 4), "has shape"),
        (torch.ones(1, 1, 5, 5), "has shape"),
    ],
)
def test_c54_a_mask_that_is_no_padding_is_refused(opened, mask, problem):
    with (
        opened() as engine,
        pytest.raises(CacheError, match=problem),
        engine.cache_for(torch.ones(2, 5, dtype=torch.long), attention_mask=mask),
    ):
        pass


def test_c54_a_batch_without_room_says_what_to_lower(model, opened, monkeypatch):
    def refuse(*_args, **_options):
        raise RuntimeError("not enough memory")

    with opened() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "new_empty", refuse)
            with (
                pytest.raises(PoolError, match="batch of 2 sequences of 208 tokens.*lower the number of"),
                engine.cache_for(torch.ones(2, 5, dtype=torch.long)),
            ):
                pass
        assert run(engine, model, PROMPTS) == 0


def test_c40_a_model_whose_kv_depends_on_its_neighbours_is_refused(opened):
    model = tiny_model()
    mean = model.model.layers[1].self_attn.k_proj

    class Mixing(torch.nn.Linear):
        def forward(self, states):
            return super().forward(states - states.mean(0, keepdim=True) * (len(states) > 1))

    model.model.layers[1].self_attn.k_proj = mixing = Mixing(mean.in_features, mean.out_features, bias=False)
    mixing.weight = mean.weight
    with opened(model) as engine:
        engine.generate(DOCUMENT, max_tokens=1)
        with (
            pytest.raises(UnsupportedModelError, match="its KV in a batch is another than alone"),
            engine.cache_for(torch.tensor([DOCUMENT] * 2)),
        ):
            pass
