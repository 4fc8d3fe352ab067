"""Takes one prompt after another through kvtier's session: restores what is stored of it, and hands on what is new."""

import itertools
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from kvtier_core import Settings
from kvtier_core.engine import EngineSession, Hints, PrefillCost, RequestIdentity, open_session
from kvtier_llamacpp.canary import measure
from kvtier_llamacpp.context import Memory
from kvtier_llamacpp.copies import Copies
from kvtier_llamacpp.errors import LlamaError
from kvtier_llamacpp.namespace import namespace_for

_STORE_PATIENCE_S = 2.0
"""How long one prompt waits in all for tiers that are behind, before they leave blocks of it out."""
_log = logging.getLogger("kvtier.llamacpp")


class Keeper:
    """What an engine keeps in kvtier. One prompt at a time, on one thread at a time."""

    @classmethod
    def open(
        cls,
        memory: Memory,
        settings: Settings,
        *,
        num_blocks: int,
        setup: str,
        kv_dtype: str = "float16",
        wait_timeout_s: float,
    ) -> Self:
        """Try the empty *memory*, take room for copies of *num_blocks* blocks, open the pool and the tiers.

        *setup* says what the bytes depend on beside the model's files. Raises ``UnsupportedModelError`` where the trial
        fails, ``LlamaError`` where a file of the model has changed since it was loaded, and as ``open_session`` does.
        """
        copies = Copies(memory, num_blocks, measure(memory))
        namespace = namespace_for(
            memory.model.files,
            setup=f"{setup}, {memory.rope}",
            kv_dtype=kv_dtype,
            tokens_per_block=memory.tokens_per_block,
            groups=copies.groups,
        )
        memory.model.check_unchanged()
        return cls(memory, copies, open_session(settings, namespace, copies.layout), wait_timeout_s)

    def __init__(self, memory: Memory, copies: Copies, session: EngineSession, wait_timeout_s: float) -> None:
        """Put together what ``open`` makes. *session* is the keeper's own from here on."""
        self._memory = memory
        self._copies = copies
        self._session = session
        self._wait_timeout_s = wait_timeout_s
        self._cost = PrefillCost()
        self._ids = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._request: str | None = None
        """The prompt at hand, or the last one."""
        self._copies_lost = False
        self._patience_s = 0.0

    @contextmanager
    def prompt(self, token_ids: Sequence[int], salt: str | None, hints: Hints | None) -> Iterator[None]:
        """A prompt from its announcement to its end."""
        self.begin(token_ids, salt, hints)
        try:
            yield
        except BaseException:
            self.abort()
            raise
        self.end()

    def begin(
        self,
        token_ids: Sequence[int],
        salt: str | None = None,
        hints: Hints | None = None,
        *,
        held: int = 0,
    ) -> None:
        """Announce a prompt, of which llama.cpp's memory holds the first *held* tokens still. Forgets the rest.

        The last prompt's blocks may still be on their way into the pool, out of the memory that is filled next: raises
        ``LlamaError`` when they don't get there in time.
        """
        if self._copies_lost:
            raise LlamaError("a copy of an earlier prompt never ended and may still read: open a new engine")
        if self._request is not None and not self._session.wait_stored(self._request, self._wait_timeout_s):
            raise LlamaError(
                f"the last prompt's blocks were not copied to the pool within {self._wait_timeout_s:g} s: try again, "
                "or open the engine with a larger wait_timeout_s"
            )
        if not held:
            self._memory.clear()
        self.forget(held)
        request = next(self._ids)
        self._session.begin(request, token_ids, RequestIdentity(salt=salt), hints=hints or Hints())
        self._request = request
        self._patience_s = _STORE_PATIENCE_S

    def forget(self, held: int) -> None:
        """Of llama.cpp's memory, all behind the first *held* tokens has changed, or is about to."""
        self._copies.keep(held // self._memory.tokens_per_block)

    def restore(self, num_tokens: int, held: int = 0) -> int:
        """Load what pool and tiers have of a prompt of *num_tokens*, if that is more than what is *held*.

        Returns the tokens whose KV is there now.
        """
        matched = min(self._session.wait_matched(self._id, self._wait_timeout_s), num_tokens - 1)
        wanted = matched // self._memory.tokens_per_block
        if wanted * self._memory.tokens_per_block <= held:
            return held
        self._copies.keep(0)  # the load writes over them, and may fail
        self._session.load(self._id, wanted * self._memory.tokens_per_block, self._copies.to_load(wanted))
        loaded = self._session.wait_loaded(self._id, self._wait_timeout_s)
        if loaded <= held:
            return held
        if held:
            self._memory.clear()
        if not self._copies.write(loaded // self._memory.tokens_per_block):
            _log.warning(
                "llama.cpp did not take a stored block in: this prompt is computed from its beginning"
            )
            self._memory.clear()
            return 0
        return loaded

    @property
    def _id(self) -> str:
        assert self._request is not None, "no prompt was begun"
        return self._request

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens that follow the prompt."""
        self._session.append(self._id, token_ids)

    def keep_state(self) -> None:
        """Read a state that is behind a whole block, unless the one before is still being copied."""
        if self._copies.is_behind_a_block and self._session.wait_stored(self._id, _STORE_PATIENCE_S):
            self._copies.read_state()

    def hand_on(self, *, is_last: bool = False) -> None:
        """Read the blocks that are new out of llama.cpp, and offer them to the pool, with the state that was kept.

        All calls of a prompt wait together for tiers that are behind, and the *last* one as long once more.
        """
        started = time.monotonic()
        num_tokens = self._copies.read_blocks() * self._memory.tokens_per_block
        patience_s = _STORE_PATIENCE_S if is_last else self._patience_s
        self._session.computed(self._id, num_tokens, self._copies.to_store(), wait_s=patience_s)
        self._session.end_step()
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - started))

    def learn_cost(self, num_tokens: int, seconds: float) -> None:
        """Computing *num_tokens* of a prompt took so long."""
        self._cost.add(num_tokens, seconds)
        if (cost := self._cost.seconds_per_token()) is not None:
            self._session.set_recompute_cost(cost)

    def hits_by_tier(self) -> Mapping[str, int]:
        """Tokens loaded for the prompt at hand, by where they came from."""
        return self._session.request_hits(self._id)

    def misses(self) -> Sequence[Mapping[str, Any]]:
        """Why no more was loaded for the prompt at hand."""
        return self._session.explain(self._id)

    def end(self) -> None:
        """The prompt is done."""
        self._session.end(self._id)

    def abort(self) -> None:
        """End the prompt after an error, and wait for its copies: they must not meet the next prompt's blocks."""
        self._copies_lost = True
        self._session.abort(self._id)  # raises when its transfers do not end
        self._copies_lost = False

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything stored so far has reached the tiers; False when that takes longer."""
        return self._session.flush(timeout_s)

    def stats(self) -> Mapping[str, Any]:
        """The session's counters: hits by tier, misses by reason, bytes."""
        return self._session.stats()

    def close(self) -> None:
        """Close the session with its pool and tiers. Twice is fine."""
        self._session.close()
