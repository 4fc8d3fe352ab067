"""VLLM behind the few questions that ``kvtier certify`` asks: with the offloading connector, or without.

Decides how vLLM is asked so that it may restore: one token is generated, and its probabilities are those of the whole
vocabulary. ``prompt_logprobs`` would make vLLM compute the prompt.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import LLM, SamplingParams

from kvtier_core import KvtierError
from kvtier_vllm.figures import PREFIX
from kvtier_vllm.options import CONFIG_OPTION

Answer = tuple[NDArray[np.float32], Mapping[str, int]]
_FREE_S = 60.0
"""For the device's blocks: those whose copies are under way can't be forgotten."""
_QUIET_S = 10.0
"""Tiers whose figures stay the same for so long have what they will get."""
_ROUND_S = 0.05
_GIVEN = ("tier_stored_blocks", "tier_store_failed_blocks", "tier_dropped_blocks")


class CertifiedEngine:
    """One ``LLM``."""

    def __init__(self, model: Path, options: Mapping[str, Any], opening: Any) -> None:
        ours = {name: value for name, value in options.items() if name.startswith("kvtier_")}
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "KvtierSpec",
                "spec_module_path": "kvtier_vllm",
                **ours,
                "kvtier": dict(opening.overrides),
                **({} if opening.config is None else {CONFIG_OPTION: str(opening.config.resolve())}),
            },
        }
        self._has_kvtier: bool = opening.has_kvtier
        self._llm = LLM(
            **{name: value for name, value in options.items() if name not in ours},
            disable_log_stats=False,
            model=str(model),
            skip_tokenizer_init=True,
            max_logprobs=-1,
            max_model_len=opening.max_tokens + 1,
            kv_transfer_config=connector if opening.has_kvtier else None,
        )
        config = self._llm.llm_engine.vllm_config
        self.tokens_per_block: int = config.cache_config.block_size
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")

    def ask(self, token_ids: Sequence[int], first: int = 0) -> Answer:
        """The log probabilities of the next token, and what was restored.

        Without kvtier, the *first* tokens are computed before, and the others with vLLM's own prefix cache.
        """
        if not self._has_kvtier:
            self.forget_device()
            if first:
                self._generate(
                    token_ids[:first], SamplingParams(temperature=0, max_tokens=1, detokenize=False)
                )
        before = self._hits()
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=-1, flat_logprobs=True, ignore_eos=True, detokenize=False
        )
        output = self._generate(token_ids, params)
        found = output.outputs[0].logprobs
        answer = np.full(self.vocab_size, -np.inf, dtype=np.float32)  # (vocab,)
        answer[np.asarray(found.token_ids)] = found.logprobs
        blocks = {source: count - before.get(source, 0) for source, count in self._hits().items()}
        return answer, self._in_tokens({source: count for source, count in blocks.items() if count})

    def _in_tokens(self, blocks: Mapping[str, float]) -> dict[str, int]:
        return {source: round(count * self.tokens_per_block) for source, count in blocks.items()}

    def settle(self, timeout_s: float) -> bool:
        """Let vLLM make steps until every tier was given what the pool has, or nothing changes any more."""
        begun = changed = time.monotonic()
        seen: Mapping[tuple[str, str], float] = {}
        while time.monotonic() < begun + timeout_s:
            self._step()
            figures = self._figures()
            if figures != seen:
                seen, changed = figures, time.monotonic()
            elif _all_given(figures) or time.monotonic() > changed + _QUIET_S:
                return True
            time.sleep(_ROUND_S)
        return False

    def forget_device(self) -> None:
        """Drop vLLM's own prefix cache."""
        self._reset(connector=False)

    def reset(self) -> None:
        """Reset vLLM's cache and the connector's."""
        self._reset(connector=True)

    def _reset(self, *, connector: bool) -> None:
        deadline = time.monotonic() + _FREE_S
        while not self._llm.reset_prefix_cache(reset_connector=connector):
            if time.monotonic() > deadline:
                raise KvtierError(f"vLLM did not give its blocks free within {_FREE_S:g} s")
            self._step()

    def close(self) -> None:
        """End vLLM's processes, and with them pool and tiers."""
        self._llm.llm_engine.engine_core.shutdown()

    def _step(self) -> None:
        """Something to compute that is too short for a block: vLLM stores and tells figures in the steps after."""
        self._generate([1, 2], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False))

    def _generate(self, token_ids: Sequence[int], params: SamplingParams) -> Any:
        (output,) = self._llm.generate({"prompt_token_ids": list(token_ids)}, params, use_tqdm=False)
        return output

    def _hits(self) -> dict[str, float]:
        return {source: value for (name, source), value in self._figures().items() if name == "hit_blocks"}

    def _figures(self) -> dict[tuple[str, str], float]:
        """The figures of kvtier, by name and label."""
        found = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith(PREFIX) and hasattr(metric, "value"):
                label = metric.labels.get("source") or metric.labels.get("tier", "")
                found[metric.name.removeprefix(PREFIX), label] = metric.value
        return found


def _all_given(figures: Mapping[tuple[str, str], float]) -> bool:
    stored = figures.get(("device_stored_blocks", ""), 0.0)
    tiers = {tier for name, tier in figures if name in _GIVEN}
    made_up = {tier: figures.get(("tier_made_up_blocks", tier), 0.0) for tier in tiers}
    given = {tier: sum(figures.get((name, tier), 0.0) for name in _GIVEN) - made_up[tier] for tier in tiers}
    return stored > 0 and all(count >= stored for count in given.values())
