"""SGLang's pages in kvtier's pool and tiers: looked up, loaded and stored under the names that SGLang gives them.

Belongs to the scheduler's thread, and names no SGLang type. Only ``load`` and a prompt's first ``lookup`` wait, each
for a bounded time: SGLang has no answer for "not known yet", and a load that it was promised must not fail.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Any

from kvtier_core.engine import (
    EngineParts,
    Lookup,
    LookupState,
    OffloadKey,
    PreparedTransfer,
    RequestInfo,
    get_offload_group_idx,
    make_offload_key,
)
from kvtier_core.transfer import Direction, GroupTransfer

_ANSWER_PATIENCE_S = 0.1
"""How long a prompt's first lookup waits for tiers that have not said what they hold. A local disk always has."""
_LOAD_PATIENCE_S = 2.0
"""How long a load waits for tiers before the prompt is computed instead. The scheduler does nothing else meanwhile."""
_FORGET_S = 60.0
"""A prompt that was not looked up for so long was computed, or its client is gone. SGLang does not say."""
_log = logging.getLogger("kvtier.sglang")


class CopyStuckError(RuntimeError):
    """A copy into the engine's memory does not end. The engine must stop: its pages may be written later."""


@dataclass(frozen=True, slots=True)
class NamedBlocks:
    """Blocks of one KV group: SGLang's names of the pages at whose ends they are, and their numbers in its memory."""

    names: Sequence[str]
    numbers: Sequence[int]
    group: int = 0


@dataclass(eq=False)
class _Asked:
    """A prompt that waits in SGLang's queue."""

    id: str
    last_lookup: float = 0.0


@dataclass(eq=False)
class _Stored:
    """Blocks that SGLang offered, on their way into the pool."""

    keys: Sequence[OffloadKey]
    jobs: set[int] = field(default_factory=set)


class PageCache:
    """The pool and the tiers behind one engine's KV memory, which *parts* serve. It owns them."""

    def __init__(
        self,
        parts: EngineParts,
        tokens_per_page: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        copy_timeout_s: float = 30.0,
    ) -> None:
        self._manager, self._device, self._pool = parts
        self._tokens_per_page = tokens_per_page
        self._num_groups = len(self._manager.group_shapes)
        self._clock = clock
        self._copy_timeout_s = copy_timeout_s
        """A copy within memory takes milliseconds."""
        self.most_stored_at_once = max(
            1, min(self._pool.geometry.num_rows // 8, self._manager.max_store_room)
        )
        """Blocks stored by one device transfer at most, so that a small pool takes a part rather than nothing."""
        self._numbers = count(1)
        self._asked: dict[str, _Asked] = {}
        """By SGLang's names of the requests, those not asked for longest first."""
        self._stores: dict[int, _Stored] = {}
        """By the jobs that are under way."""
        self._offers: deque[_Stored] = deque()
        """What was offered and not acknowledged, in SGLang's order."""
        self._is_late = False
        """Whether a load has waited in vain: nothing more is promised until what it waited for has ended."""

    # -- loads

    def lookup(self, name: str, pages: Sequence[str]) -> Sequence[int]:
        """Every number of leading *pages* of the request *name* that can be loaded, those under way included.

        That is, with the last pages of its windows and the last of its states. The longest is fetched.
        """
        asked = self._asked.pop(name, None)
        is_first = asked is None
        if asked is None:
            asked = _Asked(self._begin("load", len(pages)))
        self._asked[name] = asked
        asked.last_lookup = self._clock()
        keys = self._keys(pages)
        found = self._manager.lookup(asked.id, keys)
        if is_first and found.state is LookupState.RETRY and not self._is_late:
            found = self._settle(asked.id, keys, _ANSWER_PATIENCE_S, LookupState.RETRY)
        tokens = found.ready_tokens if self._is_late else found.tokens
        if len(keys) == 1:
            return range(1, tokens // self._tokens_per_page + 1)
        ends = self._manager.ends(asked.id, keys, at_once=self._is_late)
        return [end // self._tokens_per_page for end in ends if end <= tokens]

    def load(self, name: str, blocks: Sequence[NamedBlocks]) -> bool:
        """Load all *blocks* that a prompt needs, or ``False``, and it is to be computed.

        Those of the first group are all of its pages; of windows and states the last ones. Proofs are checked before
        anything is copied. Raises ``CopyStuckError`` when the copy does not end.
        """
        pages = blocks[0].names
        asked = self._asked.pop(name, None)
        request_id = self._begin("load", len(pages)) if asked is None else asked.id
        try:
            found = self._settle(request_id, self._keys(pages), 0.0 if self._is_late else _LOAD_PATIENCE_S)
            if found.ready_tokens < len(pages) * self._tokens_per_page:
                self._give_up(name, len(pages), found)
                return False
            return self._copy(request_id, name, _in_order(blocks))
        finally:
            self._manager.request_finished(request_id)

    def _give_up(self, name: str, wanted: int, found: Lookup) -> None:
        self._is_late = self._is_late or not found.is_settled
        why = "do not arrive in time" if found.reason is None else found.reason.value.replace("_", " ")
        ready = found.ready_tokens // self._tokens_per_page
        _log.info("request %s: computed, as %d of %d pages %s", name, wanted - ready, wanted, why)

    def _copy(self, request_id: str, name: str, number_of: Mapping[OffloadKey, int]) -> bool:
        prepared = self._manager.reserve_load(request_id, list(number_of))
        if len(prepared.keys) < len(number_of):
            if prepared.keys:
                self._manager.commit_load(prepared.job_id, success=False)
            return False
        try:
            self._device.submit(Direction.LOAD, prepared.job_id, _transfers(prepared, number_of))
        except BaseException:
            self._manager.commit_load(prepared.job_id, success=False)
            raise
        if not self._device.wait(Direction.LOAD, [prepared.job_id], self._copy_timeout_s):
            raise CopyStuckError(
                f"a copy of {len(number_of)} blocks into SGLang's memory did not end in {self._copy_timeout_s:g} s: "
                "start the engine again"
            )
        has_loaded = prepared.job_id in self._take_in()
        self._manager.commit_load(prepared.job_id, success=has_loaded)
        sources = {source: prepared.sources.count(source) for source in dict.fromkeys(prepared.sources)}
        _log.info("request %s: loaded %d blocks, by source %s", name, len(number_of), sources)
        return has_loaded

    # -- stores

    def store(self, blocks: Sequence[NamedBlocks], *, store_tiers: Sequence[str] | None = None) -> None:
        """Take *blocks* of a prompt, as many of its first as there is room for.

        Those of the first group are all of its pages; other groups have what SGLang kept. They go on to *store_tiers*,
        by default to all. The engine leaves its memory as it is until ``pop_stored`` has told of them, in the order in
        which they were taken. No offer is refused: SGLang's ranks offer the same blocks, and one that has no room must
        not be out of step with the others.
        """
        number_of = _in_order(blocks)
        keys = list(number_of)
        offer = _Stored(keys)
        request_id = self._begin("store", len(blocks[0].names), store_tiers)
        for begin in range(0, len(keys), self.most_stored_at_once):
            piece = slice(begin, begin + self.most_stored_at_once)
            prepared = self._manager.reserve_store(request_id, keys[piece])
            if prepared is None:
                break
            if prepared.keys:
                self._submit(offer, prepared, number_of)
        self._manager.request_finished(request_id)
        self._offers.append(offer)

    def _submit(
        self, offer: _Stored, prepared: PreparedTransfer, number_of: Mapping[OffloadKey, int]
    ) -> None:
        job_id = prepared.job_id
        try:
            self._device.submit(Direction.STORE, job_id, _transfers(prepared, number_of))
        except BaseException:
            self._manager.commit_store(job_id, success=False)
            raise
        offer.jobs.add(job_id)
        self._stores[job_id] = offer

    def poll(self) -> int:
        """Go on: a step of the engine is over. How many offers can be acknowledged by ``pop_stored``. Never waits."""
        self._take_in()
        self._manager.end_step()
        self._is_late = self._is_late and self._manager.has_pending_work
        self._forget(self._clock() - _FORGET_S)
        return next((index for index, offer in enumerate(self._offers) if offer.jobs), len(self._offers))

    def pop_stored(self) -> bool:
        """Acknowledge the oldest offer: whether the pool has all its blocks."""
        return self._manager.has_all(self._offers.popleft().keys)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something happened that may change an answer, at most *timeout_s*."""
        self._manager.wait(timeout_s)

    @property
    def store_room(self) -> int:
        """Blocks that could be stored now without any tier having to leave one out."""
        return self._manager.store_room

    # -- figures

    @property
    def is_settled(self) -> bool:
        """Whether all that was stored has reached the tiers that take it, and nothing is loaded."""
        return not self._stores and not self._manager.has_pending_work

    def figures(self) -> dict[str, Any]:
        """As the manager's, and whether all has settled. Plain values, ready for JSON."""
        return {**self._manager.figures(), "is_settled": self.is_settled}

    # -- end

    def reset(self, *, everywhere: bool) -> None:
        """Nothing stored so far answers any more; with *everywhere* whatever ``on_reset`` says."""
        self._forget(float("inf"))
        self._manager.reset_cache(everywhere=everywhere)
        if not self._device.wait(Direction.STORE, list(self._stores), self._copy_timeout_s):
            _log.warning(
                "copies out of SGLang's KV memory still run %g s after a reset", self._copy_timeout_s
            )
        self._take_in()
        self._offers.clear()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was stored has reached the tiers that take it. Whether that was in time."""
        deadline = self._clock() + timeout_s
        self.poll()
        while not self.is_settled:
            left = deadline - self._clock()
            if left <= 0:
                return False
            self._manager.wait(left)
            self.poll()
        return True

    def close(self, timeout_s: float) -> bool:
        """Shut down within *timeout_s*. Whether everything ended; if not, the pool stays mapped."""
        deadline = self._clock() + timeout_s
        is_down = self._device.shutdown(timeout_s)
        if is_down:
            self._take_in()
        are_down = self._manager.shutdown(max(0.0, deadline - self._clock()))
        return is_down and are_down and self._pool.close()

    # -- parts

    def _begin(self, what: str, num_pages: int, store_tiers: Sequence[str] | None = None) -> str:
        request_id = f"{what}-{next(self._numbers)}"
        info = RequestInfo(request_id=request_id, num_tokens=num_pages * self._tokens_per_page)
        self._manager.new_request(info, store_tiers=store_tiers)
        return request_id

    def _keys(self, pages: Sequence[str]) -> tuple[tuple[OffloadKey, ...], ...]:
        """The keys of a block of each group at the end of each of *pages*."""
        hashes = [bytes.fromhex(page) for page in pages]
        return tuple(
            tuple(make_offload_key(block_hash, group) for block_hash in hashes)
            for group in range(self._num_groups)
        )

    def _settle(
        self,
        request_id: str,
        keys: Sequence[Sequence[OffloadKey]],
        patience_s: float,
        *pending: LookupState,
    ) -> Lookup:
        """Look up until nothing is pending, at most for *patience_s*. Only the states *pending* count where given."""
        deadline = self._clock() + patience_s
        while True:
            found = self._manager.lookup(request_id, keys)
            left = deadline - self._clock()
            if found.is_settled or (pending and found.state not in pending) or left <= 0:
                return found
            self._manager.end_step()
            self._manager.wait(left)

    def _take_in(self) -> set[int]:
        """Pass on what the device has finished. The loads among it that went well."""
        loaded = set()
        for result in self._device.get_finished():
            if result.direction is Direction.LOAD:
                if result.ok:
                    loaded.add(result.job_id)
                continue
            self._manager.commit_store(result.job_id, success=result.ok)
            offer = self._stores.pop(result.job_id)
            offer.jobs.discard(result.job_id)
        return loaded

    def _forget(self, before: float) -> None:
        """End the requests that were last looked up *before*."""
        while self._asked:
            name, asked = next(iter(self._asked.items()))
            if asked.last_lookup >= before:
                return
            del self._asked[name]
            self._manager.request_finished(asked.id)


def _in_order(blocks: Sequence[NamedBlocks]) -> dict[OffloadKey, int]:
    """Key and number of each of *blocks*, in the order of the tokens they end at.

    SGLang names a page by the SHA-256 of the prompt up to its end, in hexadecimal digits.
    """
    place = {name: index for index, name in enumerate(blocks[0].names)}
    named = [
        (place[name], make_offload_key(bytes.fromhex(name), part.group), number)
        for part in blocks
        for name, number in zip(part.names, part.numbers, strict=True)
    ]
    return {key: number for _, key, number in sorted(named, key=itemgetter(0))}


def _transfers(prepared: PreparedTransfer, number_of: Mapping[OffloadKey, int]) -> Sequence[GroupTransfer]:
    """The device's blocks and the pool's rows of each group."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for key, row in zip(prepared.keys, prepared.rows, strict=True):
        numbers, rows = found.setdefault(get_offload_group_idx(key), ([], []))
        numbers.append(number_of[key])
        rows.append(row)
    return [
        GroupTransfer(block_ids=numbers, rows=rows, group=group) for group, (numbers, rows) in found.items()
    ]
