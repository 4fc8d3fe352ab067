"""An engine for one caller at a time: generation in llama.cpp whose KV comes from and goes to kvtier's tiers.

A prompt's KV and its states come from and go to the pool through a ``Keeper``. Whatever the tiers do, the answer is the
model's: what can't be loaded is computed.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from kvtier_core import ClosedError, ConfigError, Settings, load_settings
from kvtier_core.engine import Generation, Hints
from kvtier_llamacpp.binding import build
from kvtier_llamacpp.canary import trial_tokens
from kvtier_llamacpp.context import CHUNK_TOKENS, Context
from kvtier_llamacpp.errors import LlamaError
from kvtier_llamacpp.keeper import Keeper
from kvtier_llamacpp.model import Model

_MOST_TOKENS = 1 << 24
"""More than any model has, and what llama.cpp can count."""


def _likeliest(logits: NDArray[np.float32]) -> int:
    return int(logits.argmax())


class Engine:
    """Runs a GGUF model with kvtier behind it. One prompt at a time; other threads' calls are refused meanwhile."""

    @classmethod
    def open(
        cls,
        model: Path | Model,
        *,
        max_tokens: int,
        config: Path | Settings | None = None,
        threads: int | None = None,
        flash_attention: bool = True,
        wait_timeout_s: float = 30.0,
    ) -> Self:
        """Load a GGUF file, take memory for *max_tokens* tokens, open the pool and the tiers of *config*.

        A *model* that is loaded already stays the caller's: close it after the engine. *config* is a TOML file or
        loaded settings; unset, the file ``KVTIER_CONFIG`` names. A block has ``pool.block_size`` tokens. *threads*
        compute, unset as many as there are cores. ``wait_timeout_s`` bounds every wait for tiers and copies. Before
        anything is served, two blocks are read and written again and the logits behind them compared.

        Raises ``ConfigError`` for a file that is no model, ``UnsupportedModelError`` for one that kvtier can't keep,
        ``PluginError`` where llama.cpp is missing or of another build, and as ``open_session`` does.
        """
        settings = config if isinstance(config, Settings) else load_settings(file=config)
        if not 1 <= max_tokens <= _MOST_TOKENS:
            raise ConfigError(f"max_tokens={max_tokens}: must be 1 to {_MOST_TOKENS}")
        threads = threads or len(os.sched_getaffinity(0))
        tokens_per_block = settings.pool.block_size
        num_blocks = -(-max_tokens // tokens_per_block)
        with ExitStack() as opened:
            if isinstance(model, Path):
                model = opened.enter_context(Model(model))
            context = Context(
                model,
                num_tokens=max(num_blocks * tokens_per_block, trial_tokens(tokens_per_block)),
                tokens_per_block=tokens_per_block,
                threads=threads,
                flash_attention=flash_attention,
            )
            opened.callback(context.close)
            keeper = Keeper.open(
                context,
                settings,
                num_blocks=num_blocks,
                setup=f"{build()}, {threads} threads, {'with' if flash_attention else 'without'} flash attention",
                wait_timeout_s=wait_timeout_s,
            )
            closes = opened.pop_all()
        return cls(context, keeper, max_tokens=max_tokens, wait_timeout_s=wait_timeout_s, closes=closes)

    def __init__(
        self,
        context: Context,
        keeper: Keeper,
        *,
        max_tokens: int,
        wait_timeout_s: float = 30.0,
        closes: ExitStack,
    ) -> None:
        """Put together what ``open`` makes. The engine owns *keeper* from here on, and what *closes* closes."""
        self._context = context
        self._model = context.model
        self._keeper = keeper
        self._closes = closes
        self.max_tokens = max_tokens
        """Tokens of a prompt and its answer together."""
        self._wait_timeout_s = wait_timeout_s
        self._alone = threading.Lock()
        self._user: int | None = None
        """The thread that holds the lock."""
        self._closed = False
        self._process = os.getpid()

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a block."""
        return self._context.tokens_per_block

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return self._model.vocab_size

    @property
    def trained_tokens(self) -> int:
        """Tokens of the longest prompt that the model was trained with."""
        return self._model.trained_tokens

    def tokenize(self, text: str) -> list[int]:
        """The model's tokens for *text*."""
        return self._model.tokenize(text)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of *token_ids*, without special tokens."""
        return self._model.detokenize(token_ids)

    def generate(
        self,
        prompt_ids: Iterable[SupportsIndex],
        *,
        max_tokens: int = 128,
        salt: str | None = None,
        hints: Hints | None = None,
        ignore_eos: bool = False,
        on_token: Callable[[int], bool | None] | None = None,
        choose: Callable[[NDArray[np.float32]], int] | None = None,
    ) -> Generation[NDArray[np.float32]]:
        """Complete *prompt_ids* with up to *max_tokens* tokens, the end token included if it comes.

        *salt* keeps requests apart: cached blocks are shared only between requests of one salt. *hints* say what will
        become of its blocks, and change no answer. *on_token* is called with every token, on the caller's thread; the
        answer ends there if it returns ``True``. *choose* picks each token by its logits ``(vocab,)``, which are its
        own to change; unset, the likeliest.

        Raises ``LlamaError`` when the prompt is empty, does not fit, has a token that the model does not know, or the
        engine is busy; ``ClosedError`` when it was closed. Cost: a forward pass over the tokens not cached, then one a
        token.
        """
        started = time.perf_counter()
        tokens = self._model.check_tokens(prompt_ids)
        choose = choose or _likeliest
        self._check(tokens, max_tokens)
        with self._used_alone(), self._keeper.prompt(tokens, salt, hints):
            hit_tokens = self._keeper.restore(len(tokens))
            load_s = time.perf_counter() - started
            first_logits = self._prefill(tokens, hit_tokens)
            ttft_s = time.perf_counter() - started
            token_ids = [choose(first_logits.copy())]
            while True:
                is_enough = on_token is not None and on_token(token_ids[-1]) is True
                has_ended = is_enough or (not ignore_eos and self._model.is_end(token_ids[-1]))
                if has_ended or len(token_ids) == max_tokens:
                    break
                self._keeper.append(token_ids[-1:])
                token_ids.append(choose(self._compute(token_ids[-1:])))
            self._keeper.hand_on(is_last=True)
            return Generation(
                token_ids=tuple(token_ids),
                finish_reason="stop" if has_ended else "length",
                prompt_tokens=len(tokens),
                hit_tokens=hit_tokens,
                hits_by_tier=self._keeper.hits_by_tier() if hit_tokens else {},
                misses=self._keeper.misses(),
                ttft_s=ttft_s,
                load_s=load_s,
                seconds=time.perf_counter() - started,
                first_logits=first_logits,
            )

    def _check(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        if max_tokens < 1 or not prompt_ids:
            raise LlamaError(
                f"a prompt of {len(prompt_ids)} tokens and max_tokens={max_tokens}: both must be at least 1"
            )
        if len(prompt_ids) + max_tokens - 1 > self.max_tokens:
            raise LlamaError(
                f"{len(prompt_ids)} prompt tokens and {max_tokens} more do not fit: this engine was opened for "
                f"{self.max_tokens}; open it with a larger max_tokens"
            )

    @contextmanager
    def _used_alone(self) -> Iterator[None]:
        if not self._alone.acquire(blocking=False):
            raise LlamaError("the engine is busy with another prompt: run them one after another")
        try:
            if self._closed or os.getpid() != self._process:
                raise ClosedError(
                    "the engine is closed, or was opened by the process that this one was forked from"
                )
            self._user = threading.get_ident()
            yield
        finally:
            self._user = None
            self._alone.release()

    def _prefill(self, prompt_ids: Sequence[int], hit_tokens: int) -> NDArray[np.float32]:
        """Compute the rest of the prompt, and hand its blocks on piece by piece. The logits behind it."""
        computing = 0.0
        logits = np.zeros(0, np.float32)
        for begin, end in itertools.pairwise([hit_tokens, *self._piece_ends(hit_tokens, len(prompt_ids))]):
            started = time.perf_counter()
            logits = self._compute(prompt_ids[begin:end])
            computing += time.perf_counter() - started
            self._keeper.hand_on()
        self._keeper.learn_cost(len(prompt_ids) - hit_tokens, computing)
        return logits

    def _piece_ends(self, begin: int, end: int) -> list[int]:
        """Where the pieces end in which a prompt is computed from *begin* on: where a state is kept, too.

        A state serves prompts that are the same up to it. So one is kept behind the last block that another request
        with this prompt can load, and one in about every 512 tokens, at the same places in every prompt.
        """
        if not self._model.has_state:
            return [*range(begin + CHUNK_TOKENS, end, CHUNK_TOKENS), end]
        block = self.tokens_per_block
        step = max(1, CHUNK_TOKENS // block) * block
        ends = {*range(begin // step * step + step, end, step), (end - 1) // block * block, end}
        return sorted(one for one in ends if one > begin)

    def _compute(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Compute the tokens that follow. The logits behind them. A state behind a whole block is kept."""
        logits = self._context.decode(token_ids)
        self._keeper.keep_state()
        return logits

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything stored so far has reached the tiers; False when that takes longer.

        Raises ``LlamaError`` while another thread uses the engine.
        """
        with self._used_alone():
            return self._keeper.flush(timeout_s)

    def stats(self) -> Mapping[str, Any]:
        """The session's counters: hits by tier, misses by reason, bytes."""
        return self._keeper.stats()

    def close(self) -> None:
        """Close the session with its pool and tiers, and give the model's memory back. Calling it twice is fine.

        A prompt on another thread is waited for. Raises ``LlamaError`` when it does not end, or when ``on_token`` calls
        this, and keeps the memory. In a forked child there is nothing to close.
        """
        if os.getpid() != self._process:
            return
        if self._user == threading.get_ident():
            raise LlamaError(
                "close was called by on_token, while its prompt still runs: return True from on_token, and close the "
                "engine when generate has returned"
            )
        if not self._alone.acquire(timeout=min(self._wait_timeout_s, threading.TIMEOUT_MAX)):
            raise LlamaError(
                f"another thread did not end its prompt within {self._wait_timeout_s:g} s: close again"
            )
        try:
            self._closed = True
            self._keeper.close()
            self._closes.close()
        finally:
            self._alone.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
