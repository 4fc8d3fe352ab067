"""What speculative decoding means for the KV that is kept.

A drafter proposes tokens, and vLLM's target computes each before it accepts it. So the target's KV does not depend on
who proposed what. A drafter that is a model keeps KV of its own in the target's blocks. Another drafter's would cost
acceptance, never a token. Decides which of vLLM's methods are like that. Names no vLLM type: it is given vLLM's
``VllmConfig``, or the ``SpeculativeConfig`` in it, or ``None``.
"""

from typing import Any

_WITHOUT_KV = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
_WITH_KV = ("dflash", "draft_model", "dspark", "eagle", "eagle3", "mtp")
_LOSSLESS = ("block", "standard")
"""Ways to accept proposals after which the tokens are those of the target alone."""


def drafter_of(speculative: Any) -> Any | None:
    """The ``ModelConfig`` of a drafter that keeps KV in the target's blocks; ``None`` where none does."""
    if speculative is None or speculative.method not in _WITH_KV:
        return None
    return speculative.draft_model_config


def layers_by_first_table(config: Any) -> str | None:
    """How the names of a drafter's layers begin that vLLM writes by the first KV group's block table, whichever theirs.

    ``None`` where every layer is written by its own group's. vLLM's second model runner does that for every drafter,
    its first one for all but draft models.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method != "draft_model" or config.use_v2_model_runner:
        return None
    return "draft_model."


def strange_speculation(speculative: Any) -> str | None:
    """The setting that makes speculation another than described above; ``None`` where none does."""
    if speculative is None:
        return None
    if speculative.method not in (*_WITHOUT_KV, *_WITH_KV):
        return f"method = {speculative.method!r}"
    if speculative.rejection_sample_method not in _LOSSLESS:
        return f"rejection_sample_method = {speculative.rejection_sample_method!r}"
    return None
