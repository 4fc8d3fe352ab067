"""Builds a model's tokenizer from GGUF metadata.

Decides which pre-tokenizers are known: only those whose splits are reproduced exactly, because a token that differs
from what the model was trained on is a worse answer without any error.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtier_core import UnsupportedModelError
from kvtier_transformers.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
_PREFIX = "tokenizer.ggml."

_READ = ("model", "pre", "tokens", "token_type", "merges", "scores")
_NEUTRAL = {f"{_PREFIX}{name}": None for name in _READ} | {
    f"{_PREFIX}{name}": (False,)
    for name in (
        *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
        "normalizer.lowercase",
    )
}
"""Settings that this tokenizer has, or that it does as if they were off."""
_NO_MATTER = (
    r"(?!tokenizer\.)|tokenizer\.chat_template|tokenizer\.huggingface\.json$|tokenizer\.ggml\.\w+_token_id$"
)
"""What is about the model, about conversations, the same tokenizer in another form, or names a token."""


def _pre_tokenizer(file: GGUFFile) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match file.metadata.get(_PREFIX + "model"), file.metadata.get(_PREFIX + "pre"):
        case "gpt2", "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        case "gpt2", "gpt-2":
            return byte_level
        case model, pre:
            raise UnsupportedModelError(
                f"{file.path}: tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; supported is 'gpt2' "
                "with 'smollm' or 'gpt-2': use a directory with the model's tokenizer.json"
            )


def load_gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer of *file*, chat template included.

    Raises ``UnsupportedModelError`` when it is not a known one, or asks for what this one does not do.
    """
    pre_tokenizer = _pre_tokenizer(file)
    file.refuse_other_settings(_NEUTRAL, but=_NO_MATTER)
    tokens: list[str] = file.need(_PREFIX + "tokens")
    merges = [tuple(pair.split(" ", 1)) for pair in file.need(_PREFIX + "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.metadata.get(_PREFIX + "token_type", [])
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, token_kind in zip(tokens, kinds, strict=False)
                if token_kind == kind
            ]
        )

    def named(role: str) -> Any:
        index = file.metadata.get(f"{_PREFIX}{role}_token_id")
        return None if index is None else tokens[index]

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        model_max_length=file.metadata.get("llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = file.metadata.get("tokenizer.chat_template")
    return wrapped
