"""An engine for one caller at a time: generation whose KV comes from and goes to kvtier's tiers.

Decides who may use it when, and which models and prompts it takes. Whatever the tiers do, the answer is the model's:
what can't be loaded is computed.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvtier_core import ClosedError, ConfigError, Settings, load_settings
from kvtier_core.engine import EngineSession, Generation, Hints, PrefillCost, open_session
from kvtier_core.transfer import KVLayout
from kvtier_transformers.batch import BatchedPrompt, TokenIds, flat_ids, is_plain, read_batch
from kvtier_transformers.cache import DeviceKV
from kvtier_transformers.cached_prompt import Prompt
from kvtier_transformers.canary import check_restores, trial_settings
from kvtier_transformers.decoding import GreedyDecoder
from kvtier_transformers.errors import CacheError
from kvtier_transformers.layers import check_batches, read_layers
from kvtier_transformers.namespace import namespace_for
from kvtier_transformers.sequences import Running, Sequences
from kvtier_transformers.state_bytes import StateWatch
from kvtier_transformers.support import check_generates, check_length, check_model

_log = logging.getLogger("kvtier.transformers")


def _next(logits: torch.Tensor, choose: Callable[[NDArray[np.float32]], int] | None) -> int:
    return int(logits.argmax()) if choose is None else choose(logits.float().cpu().numpy().copy())


class Engine:
    """Runs a model with kvtier behind it. One prompt or batch at a time; other threads' calls are refused meanwhile.

    ``wait_timeout_s`` bounds every wait for tiers and copies: tiers that take longer cost hits.
    """

    @classmethod
    def open(  # noqa: PLR0913 - what most callers leave as it is
        cls,
        model: torch.nn.Module,
        *,
        max_tokens: int,
        config: Path | Settings | None = None,
        chunk_tokens: int = 512,
        wait_timeout_s: float = 30.0,
        name: str | None = None,
        files: Sequence[Path] | None = None,
        edges: bool = False,
        canary: bool = True,
    ) -> Self:
        """Allocate the device's KV for *max_tokens* tokens, open the pool and the tiers of *config*.

        *config* is a TOML file or loaded settings; unset, the file ``KVTIER_CONFIG`` names. *name*, *files* and *edges*
        say what identifies the model's weights, as in ``namespace_for``: the first time, its files are read once more.
        With *canary* a few tokens are stored and loaded before anything is served, and the logits behind them compared.
        The KV is on the model's device. An accelerator is tested first, and one that copies a byte wrong is refused.
        Raises ``UnsupportedModelError`` for models kvtier can't keep, ``PoolError`` when there is too little memory,
        ``ConfigError`` and ``TierOpenError`` as ``open_session`` does.
        """
        if chunk_tokens < 1 or max_tokens < 1:
            raise ConfigError(
                f"chunk_tokens={chunk_tokens}, max_tokens={max_tokens}: both must be at least 1"
            )
        checked = check_model(model)
        settings = config if isinstance(config, Settings) else load_settings(file=config)
        check_length(checked.config, max_tokens)
        kv = DeviceKV(read_layers(checked), max_tokens=max_tokens, tokens_per_block=settings.pool.block_size)
        namespace = namespace_for(checked, kv, files=files, name=name, edges=edges)
        layout = KVLayout(kv.block_tensors())
        if canary:
            with cls(checked, kv, open_session(trial_settings(settings, kv), namespace, layout)) as trial:
                check_restores(checked, kv, trial.cache_for)
        session = open_session(settings, namespace, layout)
        if layout.device.type != "cpu":
            _log.warning(
                "the KV of %s is on %s, which passed kvtier's self-test. kvtier's authors have no accelerator: please "
                "report how it goes",
                type(checked).__name__,
                layout.device,
            )
        return cls(checked, kv, session, chunk_tokens=chunk_tokens, wait_timeout_s=wait_timeout_s)

    def __init__(
        self,
        model: PreTrainedModel,
        kv: DeviceKV,
        session: EngineSession,
        *,
        chunk_tokens: int = 512,
        wait_timeout_s: float = 30.0,
    ) -> None:
        """Put together what ``open`` makes. The engine owns *session* from here on."""
        self._model = model
        self._kv = kv
        self._session = session
        self._chunk_tokens = chunk_tokens
        self._wait_timeout_s = wait_timeout_s
        self._sequences = Sequences(model, kv, session, wait_timeout_s)
        self._one_thread = threading.RLock()
        """Held by whoever uses the session, which is no two threads' at once."""
        self._has_sequence = False
        self._takes_batches = False
        self._closed = False
        self._process = os.getpid()
        self._prefill_cost = PrefillCost()
        self._state = StateWatch(model)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV of one token, all layers."""
        return self._kv.block_bytes // self._kv.tokens_per_block

    def generate(
        self,
        prompt_ids: TokenIds,
        *,
        max_tokens: int = 128,
        salt: str | None = None,
        hints: Hints | None = None,
        ignore_eos: bool = False,
        on_token: Callable[[int], bool | None] | None = None,
        choose: Callable[[NDArray[np.float32]], int] | None = None,
    ) -> Generation[torch.Tensor]:
        """Complete *prompt_ids* with up to *max_tokens* tokens, the end token included if it comes.

        *salt* keeps requests apart: cached blocks are shared only between requests of one salt. *hints* say what will
        become of its blocks, and change no answer. *on_token* is called with every token, on the caller's thread; the
        answer ends there if it returns ``True``. *choose* picks each token by its logits ``(vocab,)``, which are its
        own to change; unset, the likeliest.

        Raises ``CacheError`` when the prompt is empty or does not fit, the engine is busy, or the model has changed;
        ``ClosedError`` also when another thread closes the engine, and in a forked child; ``UnsupportedModelError`` for
        a model without a head. Cost: a forward pass over what is not cached, then one a token.
        """
        started = time.perf_counter()
        if max_tokens < 1:
            raise CacheError(f"max_tokens must be at least 1, not {max_tokens}")
        check_generates(self._model)
        prompt = BatchedPrompt(token_ids=tuple(flat_ids(prompt_ids)))
        with self._running([prompt], max_tokens - 1, salt, hints) as running:
            (request_id,), hit_tokens = running.ids, running.hit_tokens
            load_s = time.perf_counter() - started
            hand_on = partial(self._hand_on, running)
            decoder = GreedyDecoder(
                self._model, running.cache, chunk_tokens=self._chunk_tokens, on_progress=hand_on
            )
            computing = time.perf_counter()
            first_logits = decoder.prefill(prompt.token_ids)
            token_ids = [_next(first_logits, choose)]  # also waits for a device that computes by itself
            seconds = time.perf_counter() - computing - running.seconds_handing_on
            self._learn_cost(len(prompt.token_ids) - hit_tokens, seconds)
            ttft_s = time.perf_counter() - started
            stop = frozenset() if ignore_eos else self._stop_tokens()
            while True:
                is_enough = on_token is not None and on_token(token_ids[-1]) is True
                has_ended = is_enough or token_ids[-1] in stop
                if has_ended or len(token_ids) == max_tokens:
                    break
                self._session.append(request_id, token_ids[-1:])
                token_ids.append(_next(decoder.step(token_ids[-1]), choose))
            return Generation(
                token_ids=tuple(token_ids),
                finish_reason="stop" if has_ended else "length",
                prompt_tokens=len(prompt.token_ids),
                hit_tokens=hit_tokens,
                hits_by_tier=self._session.request_hits(request_id),
                misses=self._session.explain(request_id),
                ttft_s=ttft_s,
                load_s=load_s,
                seconds=time.perf_counter() - started,
                first_logits=first_logits,
            )

    @contextmanager
    def cache_for(
        self,
        prompt_ids: TokenIds,
        *,
        attention_mask: torch.Tensor | None = None,
        salt: str | None = None,
        hints: Hints | None = None,
    ) -> Iterator[Prompt]:
        """A cache with the known prefix of a prompt, or of each in a batch, for ``model.generate`` or ``forward``.

        Like this::

            batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
            with engine.cache_for(batch.input_ids, attention_mask=batch.attention_mask) as prompt:
                output = model.generate(**batch, past_key_values=prompt.cache)
                prompt.store(output)

        ``generate`` skips the loaded tokens by itself; ``forward`` wants those after ``prompt.hit_tokens``. Without
        ``store`` nothing is kept. The cache takes tokens inside the ``with`` block only, and only those that go through
        the engine's model. A prompt's KV is known by its token ids, so that the model raises ``CacheError`` when it is
        called with a mask that hides some, with other positions, or with embeddings. Assisted generation does so where
        tokens were loaded, and so does ``use_cache=False``. Raises as ``generate`` does.

        On an accelerator the model runs on torch's current stream, which kvtier's copies wait for.

        *attention_mask* says where a batch has padding. A batch takes memory of its own: up to ``max_tokens`` for each
        sequence, padding included. Of a sequence with padding behind its prompt, only the prompt is stored.
        """
        prompts = read_batch(prompt_ids, attention_mask)
        with self._running(prompts, 0, salt, hints) as running:

            def store(new_ids: Sequence[Sequence[int]], columns: int) -> None:
                self._ensure_open()
                self._check_model()
                running.append(new_ids)
                running.hand_on(columns)
                running.await_copies()  # the caller may take tokens back and write others in their place

            yield Prompt(running, self._padding_tokens(), store)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._one_thread.acquire(blocking=False):
            raise CacheError("the engine is busy with another sequence: run them one after another")
        try:
            yield
        finally:
            self._one_thread.release()

    @contextmanager
    def _running(
        self, prompts: Sequence[BatchedPrompt], more_tokens: int, salt: str | None, hints: Hints | None
    ) -> Iterator[Running]:
        """The requests of *prompts* from their announcement to their end, while nobody else uses the engine."""
        self._ensure_open()
        with self._alone():
            if self._has_sequence:
                raise CacheError("the engine is busy with another sequence: end that first")
            self._has_sequence = True
            try:
                self._check_room(prompts, more_tokens)
                self._check_model()
                if not (self._takes_batches or is_plain(prompts)):
                    check_batches(self._model)
                    self._takes_batches = True
                with self._sequences.begin(prompts, salt, hints) as running:
                    yield running
            finally:
                self._has_sequence = False

    def _hand_on(self, running: Running, columns: int) -> None:
        self._ensure_open()  # close, on another thread, waits for this sequence
        running.hand_on(columns)

    def _ensure_open(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(
                "this process was forked from the one that opened the engine, whose threads are not here: open another"
            )
        if self._closed:
            raise ClosedError("the engine is closed")

    def _check_model(self) -> None:
        """Refuse a model that is not what it was when the engine opened: the pool holds the KV of that one."""
        check_model(self._model)
        if self._state.has_changed():
            raise CacheError(
                "the model's weights or settings have changed since the engine was opened, and what it would load was "
                "computed with the old ones: close it, and open another engine"
            )

    def _check_room(self, prompts: Sequence[BatchedPrompt], more_tokens: int) -> None:
        if not all(prompt.token_ids for prompt in prompts):
            raise CacheError("the prompt is empty: give at least one token")
        longest = max(prompt.begin + len(prompt.token_ids) for prompt in prompts)
        if longest + more_tokens > self._kv.max_tokens:
            raise CacheError(
                f"{longest} prompt tokens and {more_tokens} more do not fit: this engine was opened for "
                f"{self._kv.max_tokens}; open it with a larger max_tokens"
            )

    def _learn_cost(self, num_tokens: int, seconds: float) -> None:
        """Tell the session what computing costs, so that no tier makes a prompt slower than computing it would be."""
        self._prefill_cost.add(num_tokens, seconds)
        if (cost := self._prefill_cost.seconds_per_token()) is not None:
            self._session.set_recompute_cost(cost)

    def _stop_tokens(self) -> frozenset[int]:
        configs = (getattr(self._model, "generation_config", None), self._model.config)
        given = (getattr(config, "eos_token_id", None) for config in configs)
        found = next((ids for ids in given if ids is not None), None)
        return frozenset(found if isinstance(found, list | tuple) else () if found is None else (found,))

    def _padding_tokens(self) -> frozenset[int]:
        pad = getattr(getattr(self._model, "generation_config", None), "pad_token_id", None)
        return self._stop_tokens() if pad is None else frozenset((pad,))  # as generate chooses it

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything stored so far has reached the tiers; False when that takes longer.

        Raises ``CacheError`` while another thread uses the engine, ``ClosedError`` as ``generate`` does.
        """
        self._ensure_open()
        with self._alone():
            return self._session.flush(timeout_s)

    def stats(self) -> Mapping[str, Any]:
        """The session's counters: hits by tier, misses by reason, bytes."""
        return self._session.stats()

    def close(self) -> None:
        """Close the session with its pool and tiers. Calling it twice is fine.

        A sequence on another thread ends after its next forward pass. Raises ``CacheError`` when it does not. In a
        forked child there is nothing to close: the engine is the parent's.
        """
        if os.getpid() != self._process:
            return
        self._closed = True
        if not self._one_thread.acquire(timeout=min(self._wait_timeout_s, threading.TIMEOUT_MAX)):
            raise CacheError(
                f"another thread did not end its sequence within {self._wait_timeout_s:g} s: end it, and close again"
            )
        try:
            self._session.close()
        finally:
            self._one_thread.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
