"""What llama-cpp-python's ``Llama`` answers, token by token, with kvtier and alone."""

from typing import Any

import numpy as np

from tests.llamacpp.tiny_gguf import VOCAB

TOKENS = 16
"""Of a block."""
PROMPT = [(7 * number + number**2) % VOCAB for number in range(200)]
OTHER = [*PROMPT[:100], *PROMPT[:100]]
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
"""More threads spin for one another on cores that others use too."""


def _logits(llama):
    return np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), shape=(llama.n_vocab(),)).copy()


def ask(llama, prompt, count=8):
    """The likeliest answer, and the logits of each of its tokens."""
    answer, logits = [], []
    for token in llama.generate(prompt, temp=0.0):
        answer.append(token)
        logits.append(_logits(llama))
        if len(answer) == count:
            break
    return answer, np.array(logits)


def ask_held(plain, prompt, held, count=8):
    """What ``Llama`` answers that holds the first *held* tokens of the prompt already."""
    plain.reset()
    plain.eval(prompt)
    plain.n_tokens = held
    return ask(plain, prompt, count)


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert np.array_equal(found[1], expected[1])
