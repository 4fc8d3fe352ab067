"""Models other than plain ones: served with right answers, or refused by what they are."""

import numpy as np
import pytest

from kvtier_core import ConfigError, UnsupportedModelError
from kvtier_llamacpp.binding import library
from tests.llamacpp.conftest import OpenEngine
from tests.llamacpp.own_kv import answer_from_own_kv
from tests.llamacpp.tiny_gguf import VOCAB, WINDOW, write_bert, write_gemma3, write_llama, write_long_rope

PROMPT = [(7 * number + number**2) % VOCAB for number in range(1000)]


def test_sliding_windows_are_served_bit_by_bit_behind_the_window_and_across_it(
    open_engine: OpenEngine, tmp_path
):
    path = write_gemma3(tmp_path / "gemma3.gguf")
    assert len(PROMPT) > 512 + 8 * WINDOW
    with open_engine(path, max_tokens=1100) as engine:
        cold = engine.generate(PROMPT, max_tokens=40, ignore_eos=True)
        assert engine.flush()
    own_answer, own = answer_from_own_kv(path, lambda _: PROMPT, 992, 40)
    with open_engine(path, max_tokens=1100) as engine:
        again = engine.generate(PROMPT, max_tokens=40, ignore_eos=True)
        assert again.hits_by_tier == {"disk": 992}
        assert np.array_equal(again.first_logits, own)
        assert list(again.token_ids) == own_answer
        assert again.token_ids == cold.token_ids
        other = [*PROMPT[:100], *PROMPT[:100]]  # leaves the stored prompt in the middle of a window
        branched = engine.generate(other, max_tokens=8, ignore_eos=True)
        assert branched.hits_by_tier == {"pool": 96}
    with open_engine(path) as engine:
        assert engine.generate(other, max_tokens=8, salt="alone", ignore_eos=True).hit_tokens == 0


def test_prompts_in_a_room_with_other_rope_factors_share_nothing(open_engine: OpenEngine, tmp_path):
    path, prompt = write_long_rope(tmp_path / "long.gguf"), PROMPT[:100]
    answers = []
    for room in (256, 512, 256, 1024):
        with open_engine(path, max_tokens=room) as engine:
            answers.append(engine.generate(prompt, max_tokens=8, ignore_eos=True))
            assert engine.flush()
    short, long, short_again, longer = answers
    assert not np.allclose(short.first_logits, long.first_logits, atol=0.01)
    assert [answer.hit_tokens for answer in answers] == [0, 0, 96, 96]
    assert short_again.token_ids == short.token_ids
    assert longer.token_ids == long.token_ids


def test_a_long_answer_is_kept_behind_its_window_as_well(open_engine: OpenEngine, tmp_path):
    with open_engine(write_gemma3(tmp_path / "gemma3.gguf"), max_tokens=1100) as engine:
        answer = engine.generate(PROMPT[:40], max_tokens=1000, ignore_eos=True)
        longer = [*PROMPT[:40], *answer.token_ids]
        again = engine.generate([*longer, *PROMPT[:20]], max_tokens=1)
    assert again.hits_by_tier == {"pool": (len(longer) - 1) // 16 * 16}


@pytest.mark.parametrize(
    ("function", "kind"),
    [("llama_model_is_diffusion", "is a diffusion model"), ("llama_model_has_encoder", "has an encoder")],
)
def test_a_model_of_another_kind_is_refused_by_what_it_is(
    open_engine: OpenEngine, tmp_path, monkeypatch, function, kind
):
    monkeypatch.setattr(library(), function, lambda _: True)
    path = write_llama(tmp_path / "other.gguf")
    with pytest.raises(UnsupportedModelError, match=rf"other\.gguf \(.+\) {kind}"):
        open_engine(path)


def test_a_model_that_keeps_no_kv_is_refused(open_engine: OpenEngine, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"can't keep what this model computes \(bert"):
        open_engine(write_bert(tmp_path / "bert.gguf"))


@pytest.mark.parametrize(
    "damage",
    [
        {"block_count": 0},
        {"block_count": 1},
        {"block_count": 3},
        {"block_count": 512},
        {"block_count": 513},
        {"block_count": 2**32 - 1},
        {"block_count": "two"},
        {"attention__head_count": 0},
        {"attention__head_count_kv": 3},
        {"attention__key_length": 15},
        {"embedding_length": 63},
        {"vocab_size": 100},
    ],
    ids=str,
)
def test_a_file_that_says_otherwise_than_its_tensors_is_refused_and_the_process_goes_on(
    open_engine: OpenEngine, tmp_path, damage
):
    path = write_llama(tmp_path / "damaged.gguf", **damage)
    with pytest.raises(ConfigError, match=r"damaged\.gguf: "):
        open_engine(path)


def test_a_file_that_is_cut_anywhere_is_refused(open_engine: OpenEngine, tmp_path):
    data = write_llama(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 8, 23, 24, 100, 1000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf: "):
            open_engine(path)
