"""What llama.cpp answers behind KV that it kept itself: the right answer behind restored KV, bit by bit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier_llamacpp import Model
from kvtier_llamacpp.binding import library
from kvtier_llamacpp.context import Context

BLOCK = 16


def answer_from_own_kv(
    path: Path, choose: Callable[[Model], Sequence[int]], held: int, num_answered: int
) -> tuple[list[int], Any]:
    """The answer to a prompt of which the first *held* tokens are kept, and the logits behind the prompt.

    *choose* gives the prompt's tokens. All are computed as a cold prompt, and those not held once more.
    """
    with Model(path) as model:
        tokens = list(choose(model))
        context = Context(
            model,
            num_tokens=-(-(len(tokens) + num_answered) // BLOCK) * BLOCK,
            tokens_per_block=BLOCK,
            threads=2,
            flash_attention=True,
        )
        try:
            context.decode(tokens)
            library().llama_memory_seq_rm(library().llama_get_memory(context.handle), 0, held, -1)
            logits = context.decode(tokens[held:])
            return go_on(context, logits, num_answered), logits
        finally:
            context.close()


def go_on(context: Context, logits: Any, num_answered: int) -> list[int]:
    """The most likely tokens behind *logits*, one after the other."""
    answer = [int(logits.argmax())]
    while len(answer) < num_answered:
        answer.append(int(context.decode(answer[-1:]).argmax()))
    return answer
