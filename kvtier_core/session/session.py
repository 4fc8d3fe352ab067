"""The engine session: the steps of each request that an engine drives, without knowing the tiers.

A request's life::

    begin -> match (None: not known yet) -> load -> wait_loaded
          -> computed, append, computed, ... -> end | abort

An engine with steps calls ``end_step`` after each. One without uses ``wait_matched``, ``wait`` and ``flush``, which
sleep, never spin. All methods belong to one thread, the engine's.

The session always leaves one token to compute. It decides nothing about tiers: that is the coordinator's.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvtier_core.errors import ClosedError, UnknownRequestError
from kvtier_core.hints import NO_HINTS, Hints
from kvtier_core.keys import RequestIdentity
from kvtier_core.manager.manager import TierManager
from kvtier_core.prompts import HashedPrompt
from kvtier_core.session.device_blocks import BlockIds, DeviceBlocks
from kvtier_core.session.transfers import Request, Transfer, Transfers
from kvtier_core.transfer.device import Device
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.pool import Pool
from kvtier_core.transfer.waiting import bounded
from kvtier_core.values import Lookup, RequestInfo

DEFAULT_TIMEOUT_S = 30.0


class EngineSession:
    """One engine's use of kvtier. Made by ``open_session``; a context manager."""

    def __init__(self, manager: TierManager, device: Device, pool: Pool, tokens_per_block: int) -> None:
        """*tokens_per_block* are those of a block hash. The KV groups are those of the manager's namespace."""
        self._manager = manager
        self._shapes = manager.group_shapes
        self._groups = list(manager.namespace.cached_groups)
        """The cached groups' indices in the namespace; everything else here counts the cached ones alone."""
        self._blocks = DeviceBlocks(self._shapes, self._groups)
        self._device = device
        self._pool = pool
        self._tokens_per_block = tokens_per_block
        self._piece = max(1, min(pool.geometry.num_rows // 8, manager.max_store_room))
        """Blocks stored by one device transfer at most, so that a small pool takes a part rather than nothing."""
        self._requests: dict[str, Request] = {}
        self._transfers = Transfers(manager, device)
        self._waited_in_vain = False
        """The last wait for tiers that are behind brought no room, and there was none since."""
        self._closing = False
        self._closed = False
        self._process = os.getpid()

    def set_recompute_cost(self, seconds_a_token: float | None) -> None:
        """Say what computing a token costs. Blocks that a tier would take longer to load are not loaded (C35).

        With ``None``, the default, everything is loaded that can be.
        """
        self._manager.set_recompute_cost(seconds_a_token)

    # -- a request's life

    def begin(
        self,
        request_id: str,
        token_ids: Sequence[int],
        identity: RequestIdentity = RequestIdentity(),  # noqa: B008 - frozen
        params: Mapping[str, Any] | None = None,
        *,
        hints: Hints = NO_HINTS,
    ) -> None:
        """Begin a request with its prompt. *params* are the engine's ``kv_transfer_params`` (a mapping, or ``None``).

        ``{"kvtier": {"load_tiers": [...], "store_tiers": [...]}}`` restricts it to these tiers; the pool serves every
        request. ``{"do_remote_decode": True}`` gives every tier it may store to the whole request (C25). *hints* say
        what else is known about the use of its blocks. Raises ``ValueError`` when the id is in use, or a tier of that
        name is not there.
        """
        self._poll()
        info = RequestInfo(
            request_id=request_id, num_tokens=len(token_ids), params=dict(params or {}), hints=hints
        )
        prompt = HashedPrompt(identity, self._tokens_per_block, self._shapes, self._groups)
        prompt.extend(token_ids)
        self._manager.new_request(info)
        self._requests[request_id] = Request(info, prompt)
        if hints.prefetch:
            self._manager.prefetch(request_id, prompt.loadable_keys)

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add generated tokens. Raises ``ValueError`` for what is no token ids, and nothing has changed then."""
        self._request(request_id).prompt.extend(token_ids)

    def _request(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            self._ensure_open()
            raise UnknownRequestError(f"request {request_id!r} is not known: it never began, or has ended")
        return request

    def match(self, request_id: str) -> int | None:
        """How many leading tokens can be loaded: whole blocks of every group, at most all tokens but one.

        ``None`` while more may come: end the step and ask again. Cost: proportional to the request's blocks, constant
        while the answer is pending; no I/O.
        """
        self._poll()
        found = self._look_up(self._request(request_id))
        return found.ready_tokens if found.is_settled else None

    def _look_up(self, request: Request) -> Lookup:
        request_id = request.info.request_id
        if not request.has_begun:
            self._manager.request_begins(request_id)
        return self._manager.lookup(request_id, request.prompt.loadable_keys)

    def wait_matched(self, request_id: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """``match`` for an engine without steps: sleeps until that is known. After *timeout_s*, what can be loaded."""
        deadline = _deadline(timeout_s)
        while (tokens := self.match(request_id)) is None:
            self.end_step()
            left = deadline - time.monotonic()
            if left <= 0:
                return self._look_up(self._request(request_id)).ready_tokens
            self._manager.wait(left)
        return tokens

    def load(self, request_id: str, num_tokens: int, block_ids: BlockIds) -> None:
        """Start the device load of the first *num_tokens* tokens into the device blocks *block_ids*.

        ``block_ids[i]`` is the request's i-th block; with several KV groups, ``block_ids[group][i]`` is, by the group's
        index in the namespace. Of a sliding window only the last blocks are written. ``wait_loaded`` says what came.
        Raises ``ValueError`` for fewer device blocks than blocks to load, a negative *num_tokens*, or a load under way.
        """
        request = self._request(request_id)
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0, not {num_tokens}")
        limit = min(num_tokens, request.prompt.max_loadable)
        ids = self._blocks.by_group(
            block_ids, limit, "{needed} blocks to load, but only {given} device blocks"
        )
        if request.load_job is not None:
            raise ValueError(f"a load of request {request_id!r} is under way")
        request.load_tokens = 0
        request.hits.clear()
        tokens = self._manager.loadable(request.prompt.keys_within(limit))
        blocks = request.prompt.needed(tokens)
        prepared = self._manager.reserve_load(request_id, [block.key for block in blocks])
        if not prepared.keys:
            return
        assert len(prepared.keys) == len(blocks), "a block that could be loaded is gone"
        request.has_begun = True
        request.load_job = prepared.job_id
        request.load_tokens = tokens
        hits = self._blocks.hits_of(prepared, blocks)
        transfer = Transfer(direction=Direction.LOAD, request=request, hits=hits)
        self._transfers.start(prepared, transfer, self._blocks.transfers(prepared, blocks, ids))

    def wait_loaded(self, request_id: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Wait for the device load. Returns the tokens that are in the device blocks now; the rest is to be computed.

        Raises ``TimeoutError`` when the device has not finished: its blocks must not be used then.
        """
        request = self._request(request_id)
        if request.load_job is not None:
            self._wait_device(Direction.LOAD, request_id, timeout_s)
        return request.load_tokens

    def computed(self, request_id: str, num_tokens: int, block_ids: BlockIds, *, wait_s: float = 0.0) -> None:
        """The KV of the first *num_tokens* tokens is in the device blocks *block_ids*: store the blocks that are new.

        Waits up to *wait_s* for tiers that are behind, so that a pool not much larger than the prompt does not make
        them leave blocks out. After a wait in vain there is none until they have caught up. The blocks must not be
        rewritten before ``wait_stored``. Blocks that find no room in the pool, or whose device store failed, are
        offered again by the next call. Nothing is stored when a reset came since the request's first lookup: its KV may
        be that of other weights. Where a tier gets the whole request, loaded blocks are offered as well. Raises
        ``ValueError`` when there are fewer device blocks than whole blocks.
        """
        self._poll()
        request = self._request(request_id)
        ids = self._blocks.by_group(
            block_ids,
            min(num_tokens, request.prompt.num_tokens),
            "{needed} whole blocks were computed, but only {given} device blocks given",
        )
        request.has_begun = True
        if not self._manager.may_store(request_id):
            return
        if not self._manager.is_request_level(request_id):
            request.offered = max(request.offered, request.prompt.count_within(request.load_tokens))
        complete = request.prompt.count_within(num_tokens)
        deadline = _deadline(wait_s)
        begin = request.offered
        while begin < complete:
            end = min(complete, begin + self._piece)
            blocks = [
                block
                for block in request.prompt.blocks[begin:end]
                if self._blocks.has(block, request.load_tokens, ids)
            ]
            self._wait_for_store_room(len(blocks), deadline)
            prepared = self._manager.reserve_store(request_id, [block.key for block in blocks])
            if prepared is None:
                return
            if request.offered == begin:  # else a store failed meanwhile: the next call begins there
                request.offered = end
            if prepared.keys:
                transfer = Transfer(direction=Direction.STORE, request=request, offered=begin)
                self._transfers.start(prepared, transfer, self._blocks.transfers(prepared, blocks, ids))
            begin = end

    def _wait_for_store_room(self, blocks: int, deadline: float) -> None:
        may_wait = not self._waited_in_vain
        while (
            (is_short := self._manager.store_room < blocks)
            and may_wait
            and (left := deadline - time.monotonic()) > 0
        ):
            self.wait(left)
            self._waited_in_vain = True
        self._waited_in_vain = is_short and self._waited_in_vain

    def end(self, request_id: str) -> None:
        """The request is done. Its device blocks may be reused after ``wait_stored``."""
        self._poll()
        self._request(request_id)
        del self._requests[request_id]
        self._manager.request_finished(request_id)

    def abort(self, request_id: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """End the request early, and wait for its device transfers: afterwards its blocks may be reused.

        An engine that preempts a request aborts it, and begins it again with all its tokens. Raises ``TimeoutError``
        when the transfers take longer; the request is over all the same.
        """
        self.end(request_id)
        deadline = _deadline(timeout_s)
        for direction in Direction:
            self._wait_device(direction, request_id, max(0.0, deadline - time.monotonic()))

    def wait_stored(self, request_id: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Wait until no device store of this request is under way, also after ``end``. Whether that was in time."""
        try:
            self._wait_device(Direction.STORE, request_id, timeout_s)
        except TimeoutError:
            return False
        return True

    # -- steps and waiting

    def end_step(self) -> None:
        """The engine's step is over: promotions leave, finished transfers are taken in."""
        self._poll()
        self._manager.end_step()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something happened that may change an answer, at most *timeout_s*. Whether it did."""
        self._poll()
        happened = self._manager.wait(timeout_s)
        self._poll()
        return happened

    def flush(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Wait until all that was computed has reached the tiers that take it. Whether that was in time."""
        deadline = _deadline(timeout_s)
        self.end_step()
        while self._transfers or self._manager.has_pending_work:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(left)
        return True

    def _wait_device(self, direction: Direction, request_id: str, timeout_s: float) -> None:
        self._ensure_open()
        self._transfers.wait(direction, request_id, timeout_s)

    def _poll(self) -> None:
        self._ensure_open()
        self._transfers.take_in()

    # -- reset and end

    def reset_cache(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Nothing stored so far answers any more, in any tier (C34).

        A request that has loaded or computed goes on with its device blocks, and stores no more. Device copies under
        way are waited for, no tier: afterwards the engine may give its KV memory up. Raises ``TimeoutError`` when they
        take longer than *timeout_s*; the cache is reset all the same.
        """
        self._ensure_open()
        self._manager.reset_cache()
        if not self._pool.wait_for_copies(timeout_s):
            raise TimeoutError(
                f"the cache was reset, but device copies are still under way after {timeout_s:g} s: keep the engine's "
                "KV memory until wait_stored, abort or close has ended"
            )
        self._poll()

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Shut down within *timeout_s*. Every other method but ``stats`` raises ``ClosedError`` then.

        Returns whether everything ended. If not, the pool's mapping is kept, and a later call tries again. A forked
        child has none of the threads, and nothing to end.
        """
        if self._closed or os.getpid() != self._process:
            return True
        deadline = _deadline(timeout_s)
        device_down = self._device.shutdown(timeout_s)
        if device_down and not self._closing:
            self._poll()
        self._closing = True
        tiers_down = self._manager.shutdown(max(0.0, deadline - time.monotonic()))
        self._closed = device_down and tiers_down and self._pool.close()
        if self._closed:
            self._requests.clear()
        return self._closed

    def _ensure_open(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(
                "this process was forked from the one that opened the session, whose threads are not here: open another"
            )
        if self._closing:
            raise ClosedError("the session was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reports

    def request_hits(self, request_id: str) -> dict[str, int]:
        """Tokens loaded for this request by where they came from: ``pool`` or a tier's name. Before ``end``."""
        return dict(self._request(request_id).hits)

    def explain(self, request_id: str) -> list[dict[str, Any]]:
        """Why this request could not load more: where its lookups ended, in the order of the prompt. Before ``end``.

        Each entry has the first token of the block that missed (``from_token``), its KV group's index in the namespace
        (``group``) and the ``reason`` (a value of ``MissReason``).
        """
        prompt = self._request(request_id).prompt
        misses = self._manager.misses(request_id)
        return [
            {
                "from_token": block.end - self._shapes[block.group].tokens_per_block,
                "group": self._groups[block.group],
                "reason": misses[block.key].value,
            }
            for block in prompt.blocks
            if block.key in misses
        ]

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and each tier's state, ready for JSON."""
        return {**self._manager.figures(), "hit_tokens": dict(self._transfers.hit_tokens)}


def _deadline(timeout_s: float) -> float:
    return time.monotonic() + bounded(timeout_s)
