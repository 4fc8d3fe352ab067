"""What namespaces that no engine uses hold below the URL: it counts within the capacity, and leaves first.

A URL outlives namespaces: other weights, another cache epoch. For example an engine with unknown weights that is
started four times makes four of them. Of what the first three hold the oldest block goes when the fourth needs the
room. What other engines use neither counts nor goes: they keep it within their own capacity.

Decides which blocks go; how many may stay is the capacity's, what is in use is up to ``namespace.json``.
"""

import logging
import re
import threading
import time
from dataclasses import dataclass

from kvtier_core.tier import format_size
from kvtier_fsspec import description
from kvtier_fsspec.layout import BLOCK_NAME, LONGEST_SCAN_S
from kvtier_fsspec.packs import PackName
from kvtier_fsspec.places import Place

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class _Block:
    namespace: str
    path: str
    bytes: int
    time: float


class UnusedNamespaces:
    """The blocks below a URL that are in no namespace in use, as of ``learn``, within *capacity*.

    Safe from any thread. Every method raises ``StorageError`` for a fault of the storage.
    """

    def __init__(self, place: Place, mine: str, capacity: int | None, log: logging.Logger) -> None:
        """Beside the namespace *mine*. No I/O."""
        self._place = place
        self._mine = mine
        self._capacity = capacity
        self._log = log
        self._lock = threading.Lock()  # guards the two below; never held during I/O
        self._newest_first: list[_Block] = []
        self._bytes = 0

    def learn(self) -> None:
        """Find out what is out of use, and remove what is left of emptied namespaces.

        Cost: a listing of the namespaces and a request for each, and a listing of each that is newly out of use; half
        a minute at most, what is not listed then is the next time.
        """
        if self._capacity is None:
            return
        unused = self._out_of_use()
        with self._lock:
            self._keep([block for block in self._newest_first if block.namespace in unused])
            known = {block.namespace for block in self._newest_first}
        give_up = time.monotonic() + LONGEST_SCAN_S
        for name in sorted(unused - known):
            blocks = self._list(name, give_up)
            with self._lock:
                self._keep([*self._newest_first, *blocks])
            if blocks:
                self._log.info(
                    "%d objects (%s) of the namespace %s, which no engine uses, count within capacity and leave first",
                    len(blocks),
                    format_size(sum(block.bytes for block in blocks)),
                    name,
                )

    def make_room(self, needed: int) -> None:
        """Remove blocks until *needed* bytes fit beside the others; after a fault all of them count still."""
        going = self._next_to_go(needed)
        if not going:
            return
        try:
            self._place.remove([block.path for block in going])
        except OSError:
            with self._lock:
                self._keep([*self._newest_first, *going])
            raise

    def _next_to_go(self, needed: int) -> list[_Block]:
        going: list[_Block] = []
        with self._lock:
            while self._capacity is not None and self._newest_first and self._bytes + needed > self._capacity:
                going.append(self._newest_first.pop())
                self._bytes -= going[-1].bytes
        return going

    def _keep(self, blocks: list[_Block]) -> None:
        self._newest_first = sorted(blocks, key=lambda block: block.time, reverse=True)
        self._bytes = sum(block.bytes for block in blocks)

    def _out_of_use(self) -> set[str]:
        others = [
            name for name in self._place.namespaces() if name != self._mine and _NAMESPACE.fullmatch(name)
        ]
        found = self._place.heads([f"{name}/{description.NAME}" for name in others], description.LONGEST)
        return {
            name for name, content in zip(others, found, strict=True) if description.is_out_of_use(content)
        }

    def _list(self, name: str, give_up: float) -> list[_Block]:
        blocks: list[_Block] = []
        leftovers: list[str] = []
        is_complete = True
        for found in self._place.objects(name):
            if time.monotonic() > give_up:
                return blocks
            if BLOCK_NAME.fullmatch(found.path) or PackName.at(found.path):
                blocks.append(_Block(name, found.path, found.size, found.time))
            elif found.is_leftover:
                leftovers.append(found.path)
            elif found.is_temporary:
                is_complete = False
        # Without the description nobody would come back for what is younger.
        if not blocks and is_complete:
            self._place.remove_rest(name, leftovers)
        return blocks
