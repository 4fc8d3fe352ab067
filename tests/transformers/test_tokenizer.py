import re

import pytest

from kvtier_core import UnsupportedModelError
from kvtier_transformers.gguf import GGUFFile
from kvtier_transformers.models import find_smollm2
from kvtier_transformers.tokenizer import load_gguf_tokenizer
from tests.transformers.gguf_writer import write_gguf

# byte-level: a space is written as U+0120
TOKENS = ["<end>", "<tool>", *"ab12345", "\u0120", "ab", "\u0120ab", "12"]
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 4] + [1] * (len(TOKENS) - 2),
    "tokenizer.ggml.merges": ["a b", "\u0120 ab", "1 2"],
    "tokenizer.ggml.eos_token_id": 0,
    "llama.context_length": 64,
}


def tokenizer(tmp_path, **change):
    return load_gguf_tokenizer(GGUFFile(write_gguf(tmp_path / "t.gguf", METADATA | change, {})))


def test_digits_are_tokens_of_their_own(tmp_path):
    split = tokenizer(tmp_path)
    assert split.convert_ids_to_tokens(split.encode("ab ab12")) == ["ab", "\u0120ab", "1", "2"]
    whole = tokenizer(tmp_path, **{"tokenizer.ggml.pre": "gpt-2"})
    assert whole.convert_ids_to_tokens(whole.encode("ab ab12")) == ["ab", "\u0120ab", "12"]


def test_control_and_user_defined_tokens_are_found_in_text(tmp_path):
    found = tokenizer(tmp_path)
    assert found.encode("ab<end><tool>a") == [10, 0, 1, 2]
    assert found.eos_token_id == 0
    assert found.decode([10, 0, 1, 2], skip_special_tokens=True) == "ab<tool>a"


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedModelError, match="'gpt2' with pre-tokenizer 'llama-bpe' is not supported"):
        tokenizer(tmp_path, **{"tokenizer.ggml.pre": "llama-bpe"})


def test_missing_metadata_is_named(tmp_path):
    metadata = {name: value for name, value in METADATA.items() if name != "tokenizer.ggml.merges"}
    with pytest.raises(UnsupportedModelError, match=r"lacks tokenizer\.ggml\.merges"):
        load_gguf_tokenizer(GGUFFile(write_gguf(tmp_path / "t.gguf", metadata, {})))


@pytest.mark.real_model
def test_smollm2_round_trip_and_known_tokens():
    real = load_gguf_tokenizer(GGUFFile(find_smollm2()))
    text = "It's 12345 d\u00e9j\u00e0 vu \U0001f600\n\n   x=  3.14"
    ids = real.encode(text)
    assert real.decode(ids) == text
    assert [real.decode([token]) for token in ids][2:8] == [" ", "1", "2", "3", "4", "5"]
    chat = real.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert real.decode(chat).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert chat[0] == real.bos_token_id == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer.ggml.add_bos_token", True),
        ("tokenizer.ggml.add_eos_token", True),
        ("tokenizer.ggml.add_space_prefix", True),
        ("tokenizer.ggml.remove_extra_whitespaces", True),
        ("tokenizer.ggml.of_some_later_release", 1),
    ],
)
def test_r4_a_setting_that_would_change_the_tokens_is_refused_by_name(tmp_path, name, value):
    with pytest.raises(UnsupportedModelError, match=re.escape(f"{name} = {value!r}")):
        tokenizer(tmp_path, **{name: value})


def test_r4_settings_that_change_no_tokens_are_fine(tmp_path):
    neutral = {
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.fim_pre_token_id": 1,
        "tokenizer.ggml.scores": [0.5],
        "tokenizer.chat_template.tool_use": "x",
    }
    assert tokenizer(tmp_path, **neutral).encode("ab12") == tokenizer(tmp_path).encode("ab12")
