"""An engine for one sequence at a time: greedy generation whose KV comes from and goes to kvtier's tiers.

Decides when to ask for cached tokens, when computed blocks are handed on, and when the device's blocks may be used
again. Transfers, tiers and waiting are the session's. Whatever the tiers do, the answer is the model's: what can't be
loaded is computed.
"""

import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from transformers import Cache, PreTrainedModel

from kvtier_core import ClosedError, ConfigError, Settings, load_settings
from kvtier_core.engine import EngineSession, PrefillCost, RequestIdentity, open_session
from kvtier_core.transfer import KVLayout
from kvtier_transformers.cache import DeviceKV
from kvtier_transformers.cached_prompt import Prompt, flat_ids
from kvtier_transformers.canary import check_restores, trial_settings
from kvtier_transformers.decoding import GreedyDecoder
from kvtier_transformers.layers import read_layers
from kvtier_transformers.model_state import StateWatch
from kvtier_transformers.namespace import namespace_for
from kvtier_transformers.support import check_generates, check_length, check_model
from kvtier_transformers.token_log import CacheError, TokenLog

_STORE_PATIENCE_S = 2.0
"""How long one sequence waits in all for tiers that are behind, before they leave blocks of it out."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished completion."""

    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    hit_tokens: int
    """Prompt tokens whose KV was loaded instead of computed."""
    hits_by_tier: Mapping[str, int]
    """The same by where they were found: ``pool`` or a tier's name."""
    misses: Sequence[Mapping[str, Any]]
    """Why no more was loaded: what ``EngineSession.explain`` says of the request."""
    ttft_s: float
    """Seconds from the call to the first token."""
    load_s: float
    """Seconds of it spent looking up and loading cached tokens."""
    seconds: float
    """Seconds from the call to the last token."""
    first_logits: torch.Tensor = field(repr=False)
    """The logits ``(vocab,)`` the first token was chosen from, fp32."""


class Engine:
    """Runs a model with kvtier behind it. One sequence at a time; a second thread's call is refused meanwhile.

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
        self._ids = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._one_thread = threading.RLock()
        """Held by whoever uses the session, which is no two threads' at once."""
        self._has_sequence = False
        self._last_request: str | None = None
        self._copies_lost = False
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
        prompt_ids: torch.Tensor | Sequence[int],
        *,
        max_tokens: int = 128,
        salt: str | None = None,
        ignore_eos: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Complete *prompt_ids* greedily with up to *max_tokens* tokens, the end token included if it comes.

        *salt* keeps requests apart: cached blocks are shared only between requests of one salt. *on_token* is called
        with every token, on the caller's thread. Raises ``CacheError`` when the prompt is empty, does not fit, or
        the engine is busy, or the model is not as it was when it was opened, ``ClosedError`` also when another thread
        closes the engine, and in a forked child, ``UnsupportedModelError`` when the model has no head to generate with.
        Cost: a forward pass over the tokens not cached, then one a token.
        """
        started = time.perf_counter()
        if max_tokens < 1:
            raise CacheError(f"max_tokens must be at least 1, not {max_tokens}")
        check_generates(self._model)
        prompt_ids = flat_ids(prompt_ids, "prompts")
        with self._request(prompt_ids, max_tokens - 1, salt) as (request_id, cache, _):
            hit_tokens, load_s = cache.get_seq_length(), time.perf_counter() - started
            hand_on = _HandOn(self._session, request_id, self._block_ids)

            def on_progress(num_tokens: int) -> None:
                self._ensure_open()  # close, on another thread, waits for this sequence
                hand_on(num_tokens)

            decoder = GreedyDecoder(
                self._model, cache, chunk_tokens=self._chunk_tokens, on_progress=on_progress
            )
            computing = time.perf_counter()
            first_logits = decoder.prefill(prompt_ids)
            token_ids = [int(first_logits.argmax())]  # also waits for a device that computes by itself
            self._learn_cost(len(prompt_ids) - hit_tokens, time.perf_counter() - computing - hand_on.seconds)
            ttft_s = time.perf_counter() - started
            stop = frozenset() if ignore_eos else self._stop_tokens()
            while True:
                if on_token is not None:
                    on_token(token_ids[-1])
                if token_ids[-1] in stop or len(token_ids) == max_tokens:
                    break
                self._session.append(request_id, token_ids[-1:])
                token_ids.append(int(decoder.step(token_ids[-1]).argmax()))
            return Generation(
                token_ids=tuple(token_ids),
                finish_reason="stop" if token_ids[-1] in stop else "length",
                prompt_tokens=len(prompt_ids),
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
        self, prompt_ids: torch.Tensor | Sequence[int], *, salt: str | None = None
    ) -> Iterator[Prompt]:
        """A cache with the prompt's known prefix loaded, for ``model.generate`` or ``model.forward``.

        Like this::

            with engine.cache_for(ids) as prompt:
                output = model.generate(ids, past_key_values=prompt.cache)
                prompt.store(output)

        ``generate`` skips the loaded tokens by itself; ``forward`` wants those after ``prompt.hit_tokens``. Without
        ``store`` nothing is kept. The cache takes tokens inside the ``with`` block only, and only those that go through
        the engine's model. A prompt's KV is known by its token ids, so that the model raises ``CacheError`` when it is
        called with a mask that hides some, with other positions, or with embeddings. Assisted generation does so where
        tokens were loaded, and so does ``use_cache=False``. Raises as ``generate`` does.
        """
        prompt_ids = flat_ids(prompt_ids, "prompts")
        with self._request(prompt_ids, 0, salt) as (request_id, cache, log):

            def store(new_ids: Sequence[int], num_tokens: int) -> None:
                self._ensure_open()
                self._check_model()
                self._session.append(request_id, new_ids)
                _HandOn(self._session, request_id, self._block_ids)(num_tokens)
                self._await_copies(
                    request_id
                )  # the caller may take tokens back and write others in their place

            yield Prompt(cache, tuple(prompt_ids), cache.get_seq_length(), log, store)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._one_thread.acquire(blocking=False):
            raise CacheError("the engine is busy with another sequence: run them one after another")
        try:
            yield
        finally:
            self._one_thread.release()

    @contextmanager
    def _request(
        self, prompt_ids: Sequence[int], more_tokens: int, salt: str | None
    ) -> Iterator[tuple[str, Cache, TokenLog]]:
        """One request from its announcement to its end, with a cache that holds what could be loaded."""
        self._ensure_open()
        with self._alone():
            if self._has_sequence:
                raise CacheError("the engine is busy with another sequence: end that first")
            self._has_sequence = True
            try:
                self._check_room(len(prompt_ids), more_tokens)
                self._check_model()
                self._wait_for_blocks()
                request_id = next(self._ids)
                self._session.begin(request_id, prompt_ids, RequestIdentity(salt=salt))
                self._last_request = request_id
                try:
                    length = self._load(request_id, len(prompt_ids))
                    log = TokenLog(prompt_ids[:length])
                    cache = self._kv.cache(length, log)
                    with log.watch(self._model, cache):
                        yield request_id, cache, log
                except BaseException:
                    self._copies_lost = True
                    self._session.abort(request_id)  # raises when this request's transfers do not end
                    self._copies_lost = False
                    raise
                self._session.end(request_id)
            finally:
                self._kv.end_cache()
                self._has_sequence = False

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

    def _check_room(self, prompt_tokens: int, more_tokens: int) -> None:
        if not prompt_tokens:
            raise CacheError("the prompt is empty: give at least one token")
        if prompt_tokens + more_tokens > self._kv.max_tokens:
            raise CacheError(
                f"{prompt_tokens} prompt tokens and {more_tokens} more do not fit: this engine was opened for "
                f"{self._kv.max_tokens}; open it with a larger max_tokens"
            )

    def _wait_for_blocks(self) -> None:
        # The last request's blocks may still be on their way into the pool; writing into them now would store the
        # next request's bytes under the last one's keys.
        if self._copies_lost:
            raise CacheError(
                "a copy of an earlier sequence never ended and may still touch the device: open a new engine"
            )
        if self._last_request is None:
            return
        self._await_copies(self._last_request)
        self._last_request = None

    def _await_copies(self, request_id: str) -> None:
        if not self._session.wait_stored(request_id, self._wait_timeout_s):
            raise CacheError(
                f"the sequence's blocks were not copied to the pool within {self._wait_timeout_s:g} s, so its "
                "device blocks can't be used again yet: try again, or open the engine with a larger wait_timeout_s"
            )

    def _load(self, request_id: str, prompt_tokens: int) -> int:
        """Load what the tiers have of the prompt's beginning; return how many tokens that is."""
        # One token is always left to compute: the logits come from computing it.
        loadable = min(self._session.wait_matched(request_id, self._wait_timeout_s), prompt_tokens - 1)
        loadable -= loadable % self._kv.tokens_per_block
        if not loadable:
            return 0
        self._session.load(request_id, loadable, self._block_ids(loadable))
        return self._session.wait_loaded(request_id, self._wait_timeout_s)

    def _learn_cost(self, num_tokens: int, seconds: float) -> None:
        """Tell the session what computing costs, so that no tier makes a prompt slower than computing it would be."""
        self._prefill_cost.add(num_tokens, seconds)
        if (cost := self._prefill_cost.seconds_per_token()) is not None:
            self._session.set_recompute_cost(cost)

    def _block_ids(self, num_tokens: int) -> range:
        return range(-(-num_tokens // self._kv.tokens_per_block))

    def _stop_tokens(self) -> frozenset[int]:
        configs = (getattr(self._model, "generation_config", None), self._model.config)
        given = (getattr(config, "eos_token_id", None) for config in configs)
        found = next((ids for ids in given if ids is not None), None)
        return frozenset(found if isinstance(found, list | tuple) else () if found is None else (found,))

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


class _HandOn:
    """Hands the computed blocks of one request on, after every forward pass, and says how long that took."""

    def __init__(self, session: EngineSession, request_id: str, block_ids: Callable[[int], range]) -> None:
        self._session = session
        self._request_id = request_id
        self._block_ids = block_ids
        self.seconds = 0.0
        """Spent so far, waiting for tiers that are behind included: no more than a little above the patience."""

    def __call__(self, num_tokens: int) -> None:
        started = time.perf_counter()
        patience_s = max(0.0, _STORE_PATIENCE_S - self.seconds)
        self._session.computed(self._request_id, num_tokens, self._block_ids(num_tokens), wait_s=patience_s)
        self._session.end_step()
        self.seconds += time.perf_counter() - started
