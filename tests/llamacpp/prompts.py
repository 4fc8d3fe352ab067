"""Prompts of any length without a download."""

from pydoc_data.topics import topics

from kvtier_llamacpp import Engine, Model


def manual(engine: Engine | Model, num_tokens: int) -> list[int]:
    """So many tokens of Python's manual."""
    tokens = engine.tokenize("\n".join(topics.values())[: 8 * num_tokens])
    assert len(tokens) >= num_tokens
    return tokens[:num_tokens]
