"""The pages of HiCache's host memory in kvtier's pool and tiers, for the threads that HiCache asks from.

Names no SGLang type. Nothing is raised: what goes wrong is logged, and is a miss or a page that was not stored. Each
call waits for a bounded time, but for copies within memory: SGLang gives the pages to others afterwards, whatever the
answer is.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtier_sglang.cache import NamedBlocks, PageCache
from kvtier_sglang.pages import page_numbers

_STORE_PATIENCE_S = 2.0
"""How long a store waits for tiers that are behind and would miss it. HiCache's backup thread waits meanwhile."""
_ROUND_S = 0.02
"""Between two looks for room."""
_STEP_S = 0.1
"""Between two steps of the manager's while HiCache asks nothing: what was stored goes on to the tiers."""
_TRIES = 2
"""After a load that was refused the second look promises only what the pool has."""
_log = logging.getLogger("kvtier.sglang")


class HostPages:
    """*cache*, which it owns, behind HiCache's questions. *is_right* says whether the weights are still those."""

    def __init__(self, cache: PageCache, tokens_per_page: int, is_right: Callable[[], bool]) -> None:
        self._cache = cache
        self._tokens_per_page = tokens_per_page
        self._is_right = is_right
        self._lock = threading.Lock()
        self._has_room = True
        """Whether the last store found room: after one that waited in vain others do not wait, until there is some."""
        self._closing = threading.Event()
        self._steps = threading.Thread(target=self._step, name="kvtier-hicache", daemon=True)
        self._steps.start()

    def count(self, pages: Sequence[str]) -> int:
        """How many of the leading *pages* can be loaded, those under way included."""
        return self._safely("a question of what is stored", self._count, pages)

    def load(self, pages: Sequence[str], slots: torch.Tensor) -> int:
        """Load *pages* into the host memory's *slots*: how many of the leading ones are there, with proofs checked."""
        return self._safely("a load", self._load, pages, slots)

    def store(self, pages: Sequence[str], slots: torch.Tensor) -> int:
        """Take the host memory's *slots* under the names *pages*: how many of the leading ones the pool has."""
        return self._safely("a store", self._store, pages, slots)

    def clear(self) -> bool:
        """Nothing stored so far answers any more, in the pool and in the tiers. Whether that went well."""
        return self._safely("a clearing", self._clear) == 1

    def figures(self) -> dict[str, Any]:
        """As ``PageCache``'s."""
        with self._lock:
            return self._cache.figures()

    def close(self, timeout_s: float) -> bool:
        """Let the tiers finish and shut them down, within *timeout_s*. As ``PageCache.close``."""
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        with self._lock:
            self._cache.flush(timeout_s / 2)
            return self._cache.close(max(0.0, deadline - time.monotonic()))

    def _safely(self, what: str, call: Callable[..., int], *arguments: object) -> int:
        if self._closing.is_set() or not self._is_right():
            return 0
        try:
            return call(*arguments)
        except Exception:  # noqa: BLE001 - HiCache's threads have no use for it
            _log.exception("%s of HiCache's came to nothing, by a fault of kvtier's: report it", what)
            return 0

    def _count(self, pages: Sequence[str]) -> int:
        with self._lock:
            return self._find(pages)

    def _load(self, pages: Sequence[str], slots: torch.Tensor) -> int:
        numbers = page_numbers(slots, self._tokens_per_page)
        assert len(numbers) == len(pages), "slots of other pages"
        with self._lock:
            for _ in range(_TRIES):
                found = self._find(pages)
                if found and self._cache.load(_name(pages), [NamedBlocks(pages[:found], numbers[:found])]):
                    return found
        return 0

    def _find(self, pages: Sequence[str]) -> int:
        return max(self._cache.lookup(_name(pages), pages), default=0) if pages else 0

    def _store(self, pages: Sequence[str], slots: torch.Tensor) -> int:
        numbers = page_numbers(slots, self._tokens_per_page)
        assert len(numbers) == len(pages), "slots of other pages"
        deadline = time.monotonic() + (_STORE_PATIENCE_S if self._has_room else 0.0)
        most = self._cache.most_stored_at_once
        for begin in range(0, len(pages), most):
            piece = slice(begin, begin + most)
            self._has_room = self._await_room(len(pages[piece]), deadline)
            if not self._store_piece(pages[piece], numbers[piece]):
                return begin
        return len(pages)

    def _await_room(self, num_pages: int, deadline: float) -> bool:
        """Wait until so many pages reach every tier whole, at most until *deadline*. Whether they do."""
        while True:
            with self._lock:
                self._cache.poll()
                if self._cache.store_room >= num_pages:
                    return True
            if time.monotonic() >= deadline or self._closing.wait(_ROUND_S):
                return False

    def _store_piece(self, pages: Sequence[str], numbers: Sequence[int]) -> bool:
        with self._lock:
            self._cache.store([NamedBlocks(pages, numbers)])
            while not self._cache.poll():
                self._cache.wait(_STEP_S)
            return self._cache.pop_stored()

    def _clear(self) -> int:
        with self._lock:
            self._cache.reset(everywhere=True)
        return 1

    def _step(self) -> None:
        while not self._closing.wait(_STEP_S):
            with self._lock:
                self._cache.poll()


def _name(pages: Sequence[str]) -> str:
    """HiCache asks under no request's name: a question and the load that follows begin with the same page."""
    return pages[0]
