"""SGLang behind the few questions that ``kvtier certify`` asks: with kvtier's linker, or without.

Decides how SGLang's own cache is emptied while kvtier's pool and tiers stay: a flush would reset them, so other prompts
push the document out. SGLang has room for little more than one of it.
"""

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang import Engine
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from kvtier_core import KvtierError
from kvtier_sglang.figures import NAME
from kvtier_sglang.plugin import LINKER

Answer = tuple[NDArray[np.float32], Mapping[str, int]]
_SPARE_PAGES = 2
"""Of the room on the device: the document fits without them. SGLang begins no prompt that leaves none."""
_IDLE_S = 60.0
_ROUND_S = 0.05


class CertifiedEngine:
    """One ``Engine``."""

    def __init__(self, model: Path, options: Mapping[str, Any], opening: Any) -> None:
        ours: dict[str, Any] = {"kvtier": dict(opening.overrides)}
        if opening.config is not None:
            ours["kvtier_config"] = str(opening.config.resolve())
        name = "unified_cache_external_linker_config"
        linker = {**LINKER, name: {**LINKER[name], "linker_extra_config": ours}}
        self.tokens_per_block: int = options["page_size"]
        pages = -(-opening.max_tokens // self.tokens_per_block)
        self._has_kvtier: bool = opening.has_kvtier
        self._engine = Engine(
            **options,
            **(linker if opening.has_kvtier else {}),
            model_path=str(model),
            skip_tokenizer_init=True,
            max_total_tokens=(pages + _SPARE_PAGES) * self.tokens_per_block,
        )
        config = self._engine.tokenizer_manager.model_config
        self.vocab_size: int = config.vocab_size
        self.dtype = str(config.dtype).removeprefix("torch.")
        self._newer = self._other_prompt(_SPARE_PAGES + 1)
        self._as_long = self._other_prompt(pages)
        self._is_empty = True
        """Whether SGLang's own cache has nothing that was asked."""

    def _other_prompt(self, pages: int) -> Sequence[int]:
        words = random.Random(pages)  # noqa: S311 - no secret
        return [words.randrange(1, self.vocab_size) for _ in range(pages * self.tokens_per_block)]

    def ask(self, token_ids: Sequence[int], first: int = 0) -> Answer:
        """The log probabilities of the next token, and what was restored.

        Without kvtier, the *first* tokens are computed before, and the others with SGLang's own cache.
        """
        if not self._has_kvtier:
            self.reset()
            if first:
                self._generate(token_ids[:first])
        before = self._hits()
        found = self._generate(
            token_ids, return_logprob=True, logprob_start_len=-1, top_logprobs_num=self.vocab_size
        )["meta_info"]
        on_device = (found.get("cached_tokens_details") or {}).get("device", 0)
        if self._has_kvtier and on_device:
            raise KvtierError(f"SGLang still had {on_device} tokens of a prompt on the device")
        answer = np.full(self.vocab_size, -np.inf, dtype=np.float32)  # (vocab,)
        for logprob, token, _ in found["output_top_logprobs"][0]:
            answer[token] = logprob
        self._is_empty = False
        restored = {source: count - before.get(source, 0) for source, count in self._hits().items()}
        return answer, {source: count * self.tokens_per_block for source, count in restored.items() if count}

    def settle(self, timeout_s: float) -> bool:
        """Wait until every tier was given what the pool has. SGLang's scheduler hands on while it is idle."""
        deadline = time.monotonic() + timeout_s
        while not self._figures()["is_settled"]:
            if time.monotonic() > deadline:
                return False
            time.sleep(_ROUND_S)
        return True

    def forget_device(self) -> None:
        """Push the document out of SGLang's own cache: the oldest pages leave first.

        One prompt is as long as the document. SGLang keeps nothing of it, so that it is not stored. What need not leave
        for it is of a short prompt, which came before.
        """
        if not self._is_empty:
            self._generate(self._newer)
            self._generate(self._as_long, bootstrap_host=FAKE_BOOTSTRAP_HOST)
            self._is_empty = True

    def reset(self) -> None:
        """Flush SGLang's cache, which resets kvtier."""
        deadline = time.monotonic() + _IDLE_S
        while not self._engine.flush_cache().success:
            if time.monotonic() > deadline:
                raise KvtierError(f"SGLang did not become idle within {_IDLE_S:g} s")
            time.sleep(_ROUND_S)

    def close(self) -> None:
        """End SGLang's processes, and with them pool and tiers."""
        self._engine.shutdown()

    def _generate(self, token_ids: Sequence[int], **more: Any) -> Any:
        params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        return self._engine.generate(input_ids=list(token_ids), sampling_params=params, **more)

    def _hits(self) -> Mapping[str, int]:
        hits: Mapping[str, int] = self._figures()["hit_blocks"] if self._has_kvtier else {}
        return hits

    def _figures(self) -> Mapping[str, Any]:
        (state,) = self._engine.get_server_info()["internal_states"]
        if NAME not in state:
            raise KvtierError("SGLang's scheduler says nothing of kvtier, which its plugin should have added")
        figures: Mapping[str, Any] = state[NAME]
        return figures
