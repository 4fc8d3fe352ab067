"""The demo's prompt: a part of Python's own manual, out of the standard library, and questions about it.

Decides the text and its order, so that every process makes the same tokens. Downloads nothing.
"""

from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

QUESTIONS = (
    "What does the assert statement do?",
    "What is the purpose of the built-in variable __debug__?",
    "What does an assignment statement do?",
)

_TASK = "Read this part of the Python manual, then answer the question after it.\n\n"
_CHARACTERS_PER_TOKEN = 16
"""More than any tokenizer packs into a token of English on average: enough text is tokenized, not all of it."""
_SLOT = "\x00"


def _chat_frame(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
    """What the model's chat template puts before and after a user's message."""
    message = [{"role": "user", "content": _SLOT}]
    head, tail = str(
        tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ).split(_SLOT)
    return head, tail


def make_prompts(tokenizer: "PreTrainedTokenizerBase", prefix_tokens: int) -> list[list[int]]:
    """One prompt a question: the same *prefix_tokens* tokens of manual, then the question."""
    head, tail = _chat_frame(tokenizer)
    manual = "\n".join(topics[name] for name in sorted(topics))
    text = head + _TASK + manual[: prefix_tokens * _CHARACTERS_PER_TOKEN]
    # verbose=False: the text is longer than the model's context on purpose, it is cut on the next line
    prefix: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)[:prefix_tokens]
    return [
        prefix + tokenizer.encode(f"\n\nQuestion: {question}{tail}", add_special_tokens=False)
        for question in QUESTIONS
    ]
