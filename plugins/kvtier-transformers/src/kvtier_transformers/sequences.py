"""The requests of the sequences in the engine's cache: begun, loaded, handed on, ended.

Decides which tokens are loaded, and when the device's blocks may be used again. A sequence without padding stands in
the blocks. Those of a batch stand in memory of their own, and go through the blocks one after another.
"""

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from transformers import Cache, PreTrainedModel

from kvtier_core.engine import EngineSession, Hints, RequestIdentity
from kvtier_transformers.batch import BatchedPrompt, is_plain
from kvtier_transformers.cache import BatchMemory, DeviceKV
from kvtier_transformers.errors import CacheError
from kvtier_transformers.token_log import TokenLog

_STORE_PATIENCE_S = 2.0
"""How long one sequence waits in all for tiers that are behind, before they leave blocks of it out."""


class Sequences:
    """Begins and ends the sequences of one cache after another."""

    def __init__(
        self, model: PreTrainedModel, kv: DeviceKV, session: EngineSession, wait_timeout_s: float
    ) -> None:
        self._model = model
        self._kv = kv
        self._session = session
        self._wait_timeout_s = wait_timeout_s
        self._ids = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._last_requests: list[str] = []
        self._copies_lost = False

    @contextmanager
    def begin(
        self, prompts: Sequence[BatchedPrompt], salt: str | None, hints: Hints | None
    ) -> Iterator["Running"]:
        """Requests for all *prompts*, from their announcement to their end, and a cache that holds what was loaded."""
        self._wait_for_blocks()
        ids = [next(self._ids) for _ in prompts]
        try:
            try:
                for request_id, prompt in zip(ids, prompts, strict=True):
                    self._session.begin(
                        request_id, prompt.token_ids, RequestIdentity(salt=salt), hints=hints or Hints()
                    )
                    self._last_requests.append(request_id)
                running = Running(self._kv, self._session, ids, prompts, self._wait_timeout_s)
                with running.log.watch(self._model, running.cache):
                    yield running
            except BaseException:
                self._copies_lost = True
                with ExitStack() as every:
                    for request_id in self._last_requests:
                        every.callback(
                            self._session.abort, request_id
                        )  # raises when its transfers do not end
                self._copies_lost = False
                raise
            for request_id in ids:
                self._session.end(request_id)
        finally:
            self._kv.end_cache()

    def _wait_for_blocks(self) -> None:
        # The last requests' blocks may still be on their way into the pool; writing into them now would store the
        # next request's bytes under the last one's keys.
        if self._copies_lost:
            raise CacheError(
                "a copy of an earlier sequence never ended and may still touch the device: open a new engine"
            )
        for request_id in self._last_requests:
            _await_copies(self._session, request_id, self._wait_timeout_s)
        self._last_requests.clear()


class Running:
    """The sequences of one cache while it is used."""

    def __init__(
        self,
        kv: DeviceKV,
        session: EngineSession,
        ids: Sequence[str],
        prompts: Sequence[BatchedPrompt],
        wait_timeout_s: float,
    ) -> None:
        """Load what the tiers have of the beginnings of *prompts*, whose requests *ids* have begun."""
        self._kv = kv
        self._session = session
        self.ids = ids
        self.prompts = prompts
        self._wait_timeout_s = wait_timeout_s
        self._memory = None if is_plain(prompts) else BatchMemory(kv, len(prompts))
        self.hit_tokens = self._load()
        """The columns that the cache holds from the start: those that are loaded in every sequence, or padding."""
        self.log = TokenLog(prompts, self.hit_tokens)
        self.cache: Cache = kv.cache(self.hit_tokens, self.log, self._memory)
        self.seconds_handing_on = 0.0
        """Waiting for tiers that are behind included: no more than a little above the patience."""

    def _load(self) -> int:
        deadline = time.monotonic() + self._wait_timeout_s
        for request_id in self.ids[1:]:
            self._session.match(request_id)  # so that the blocks of all are on their way
        matched = [
            self._match(request_id, len(prompt.token_ids), deadline - time.monotonic())
            for request_id, prompt in zip(self.ids, self.prompts, strict=True)
        ]
        columns = min(prompt.begin + count for prompt, count in zip(self.prompts, matched, strict=True))
        held = columns
        for number, (request_id, prompt) in enumerate(zip(self.ids, self.prompts, strict=True)):
            count = 0
            if wanted := len(self._block_ids(prompt.count_within(columns))):
                num_tokens = wanted * self._kv.tokens_per_block
                self._session.load(request_id, num_tokens, self._block_ids(num_tokens))
                count = self._session.wait_loaded(request_id, self._wait_timeout_s)
            if self._memory is not None:
                self._memory.take(number, prompt.begin, count)
            held = min(held, prompt.begin + count)
        return held

    def _match(self, request_id: str, prompt_tokens: int, wait_s: float) -> int:
        """How many tokens of the prompt's beginning can be loaded."""
        # One token is always left to compute: the logits come from computing it.
        loadable = min(self._session.wait_matched(request_id, max(0.0, wait_s)), prompt_tokens - 1)
        return loadable - loadable % self._kv.tokens_per_block

    def append(self, new_ids: Sequence[Sequence[int]]) -> None:
        """Add generated tokens to each sequence."""
        for request_id, token_ids in zip(self.ids, new_ids, strict=True):
            self._session.append(request_id, token_ids)

    def hand_on(self, columns: int) -> None:
        """The first *columns* columns are computed: store the blocks that are new."""
        started = time.perf_counter()
        for number, (request_id, prompt) in enumerate(zip(self.ids, self.prompts, strict=True)):
            num_tokens = prompt.count_within(columns)
            if self._memory is not None:
                self._memory.give(number, prompt.begin, num_tokens)
            patience_s = max(0.0, _STORE_PATIENCE_S - self.seconds_handing_on)
            self._session.computed(request_id, num_tokens, self._block_ids(num_tokens), wait_s=patience_s)
            self._session.end_step()
            if self._memory is not None:
                _await_copies(
                    self._session, request_id, self._wait_timeout_s
                )  # the next one needs the blocks
        self.seconds_handing_on += time.perf_counter() - started

    def await_copies(self) -> None:
        """Wait until the device's blocks have been copied."""
        for request_id in self.ids:
            _await_copies(self._session, request_id, self._wait_timeout_s)

    def _block_ids(self, num_tokens: int) -> range:
        return range(-(-num_tokens // self._kv.tokens_per_block))


def _await_copies(session: EngineSession, request_id: str, timeout_s: float) -> None:
    if not session.wait_stored(request_id, timeout_s):
        raise CacheError(
            f"the sequence's blocks were not copied to the pool within {timeout_s:g} s, so its device blocks can't be "
            "used again yet: try again, or open the engine with a larger wait_timeout_s"
        )
