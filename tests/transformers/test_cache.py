import pytest
import torch
from transformers import DynamicCache

from kvtier_core import PoolError
from kvtier_transformers.compat import cache_keyword
from kvtier_transformers.errors import CacheError
from tests.transformers.tiny import BLOCK, MODELS, device_kv, tiny_model, tokens

PROMPT = 100


def test_c54_memory_that_can_not_be_had_is_told_with_what_to_lower():
    with pytest.raises(PoolError, match=r"pool\.block_size"):
        device_kv(tiny_model(), max_tokens=1, tokens_per_block=1 << 50)


def forward(model, cache, token_ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids]), **{cache_keyword(model): cache}).logits[0]


def make_kv(model, max_tokens=160):
    return device_kv(model, max_tokens=max_tokens)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("chunk", [1, 7, PROMPT])
def test_c40_logits_equal_those_of_transformers_own_cache(kind, chunk):
    model, prompt = tiny_model(kind), tokens(PROMPT)
    ours, theirs = make_kv(model).cache(), DynamicCache(config=model.config)
    for begin in range(0, PROMPT, chunk):
        piece = prompt[begin : begin + chunk]
        torch.testing.assert_close(
            forward(model, ours, piece), forward(model, theirs, piece), atol=1e-5, rtol=1e-5
        )
    assert ours.get_seq_length() == theirs.get_seq_length() == PROMPT


@pytest.mark.parametrize("kind", MODELS)
def test_generate_gives_the_same_tokens_as_without(kind):
    model, prompt = tiny_model(kind), torch.tensor([tokens(PROMPT)])
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)
    found = model.generate(prompt, **options, **{cache_keyword(model): make_kv(model).cache()})
    assert found.tolist() == expected.tolist()


def test_generate_computes_only_what_the_cache_lacks():
    model, prompt = tiny_model(), torch.tensor([tokens(PROMPT)])
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)
    kv = make_kv(model)
    forward(model, kv.cache(), prompt[0, :96].tolist())

    lengths = []
    handle = model.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    found = model.generate(prompt, **options, **{cache_keyword(model): kv.cache(length=96)})
    handle.remove()
    assert found.tolist() == expected.tolist()
    assert lengths == [PROMPT - 96] + [1] * 7


def test_c29_tensors_are_contiguous_pages_and_shared_with_the_model():
    model = tiny_model()
    kv = make_kv(model, max_tokens=150)
    assert kv.num_blocks == 10  # rounded up to whole blocks
    assert kv.block_bytes == 2 * 2 * BLOCK * 2 * 16 * 4  # layers, K and V, tokens, heads, head_dim, fp32
    pages = kv.block_tensors()
    assert [tuple(page.shape) for page in pages] == [(10, BLOCK * 2 * 16)] * 4
    forward(model, kv.cache(), tokens(BLOCK + 1))
    for page, tensor in zip(pages, kv.tensors, strict=True):
        assert page.data_ptr() == tensor.data_ptr()
        assert page[0].abs().min() > 0
        assert page[1].count_nonzero() == 2 * 16  # one token of the second block
        assert page[2:].count_nonzero() == 0


def test_blocks_copied_elsewhere_and_back_give_the_same_logits():
    model, prompt = tiny_model(), tokens(PROMPT)
    kv = make_kv(model)
    expected = forward(model, kv.cache(), prompt)[-1]
    kept = [page[:6].clone() for page in kv.block_tensors()]
    for page in kv.block_tensors():
        page.fill_(float("nan"))
    for page, copy in zip(kv.block_tensors(), kept, strict=True):
        page[:6] = copy
    found = forward(model, kv.cache(length=96), prompt[96:])[-1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_batch_is_refused_before_anything_is_written():
    model = tiny_model()
    kv = make_kv(model)
    with pytest.raises(CacheError, match="made for 1"), torch.no_grad():
        model(input_ids=torch.tensor([tokens(5), tokens(5)]), **{cache_keyword(model): kv.cache()})
    assert all(tensor.count_nonzero() == 0 for tensor in kv.tensors)


def test_c54_too_many_tokens_are_refused_and_say_what_to_change():
    model = tiny_model()
    with pytest.raises(CacheError, match=r"33 tokens do not fit a cache of 32.*max_tokens"):
        forward(model, make_kv(model, max_tokens=32).cache(), tokens(33))


def test_another_dtype_is_refused():
    kv = make_kv(tiny_model())
    layer = kv.cache().layers[0]
    states = torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16)
    with pytest.raises(CacheError, match="bfloat16"):
        layer.update(states, states)


def test_gradients_are_refused():
    model = tiny_model()
    with pytest.raises(CacheError, match="no_grad"):
        model(input_ids=torch.tensor([tokens(5)]), **{cache_keyword(model): make_kv(model).cache()})


def test_beam_search_is_refused():
    model, prompt = tiny_model(), torch.tensor([tokens(20)])
    with pytest.raises(CacheError, match="made for 1"):
        model.generate(
            prompt,
            num_beams=2,
            max_new_tokens=3,
            do_sample=False,
            attention_mask=torch.ones_like(prompt),
            **{cache_keyword(model): make_kv(model).cache()},
        )


def test_crop_and_reset():
    model, prompt = tiny_model(), tokens(PROMPT)
    cache = make_kv(model).cache()
    expected = forward(model, cache, prompt)[-1]
    cache.crop(-10)
    assert cache.get_seq_length() == 90
    torch.testing.assert_close(forward(model, cache, prompt[90:])[-1], expected, atol=1e-4, rtol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(CacheError, match="negative"):
        cache.crop(5)


def test_mask_sizes_in_the_form_of_every_supported_release():
    layer = make_kv(tiny_model()).cache(length=32).layers[0]
    assert layer.get_mask_sizes(5) == (37, 0)
    assert layer.get_mask_sizes(torch.arange(32, 37)) == (37, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == 160
