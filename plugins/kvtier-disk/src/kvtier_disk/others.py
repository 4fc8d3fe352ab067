"""What other namespaces hold of a root with one file a block: it counts against the capacity, and leaves first.

A root outlives namespaces: other weights, another cache epoch. Of what they stored the block goes first that was used
least recently, when the namespace in use needs the room. Where a process still uses one, it finds such a block absent.

A directory that others could change, or that can't be read, is passed over: its blocks neither count nor go.

Decides which blocks go; how many may stay is the capacity's. Safe from any thread.
"""

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvtier_disk.description import NAME
from kvtier_disk.extents.place import is_namespace
from kvtier_disk.folder import Folder, ForeignError

BLOCK_NAME = re.compile(r"((?:[0-9a-f]{2})+)\.kv")
FAN_OUT_NAME = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class _Block:
    namespace: str
    name: str
    bytes: int
    used: float


class OtherNamespaces:
    """The blocks below *root* that are not those of the namespace *mine*, as of ``learn``, within *capacity*."""

    def __init__(
        self, root: Folder, mine: str, capacity: int | None, pass_over: Callable[[str, str], None]
    ) -> None:
        """*pass_over* gets the path of each directory that is passed over, and why, once. No I/O."""
        self._root = root
        self._mine = mine
        self._capacity = capacity
        self._pass_over = pass_over
        self._passed_over: set[str] = set()
        self._lock = threading.Lock()
        self._oldest_first: deque[_Block] = deque()
        self._bytes = 0

    def learn(self) -> None:
        """Find out what there is. Raises ``OSError``. Cost: a look at every file of other namespaces."""
        if self._capacity is None:
            return
        found: list[_Block] = []
        with self._root.opened() as root:
            names = [entry.name for entry in root.entries() if is_namespace(entry.name)]
        for name in names:
            if name != self._mine:
                with self._passing_over(PermissionError):
                    found += self._blocks_of(name)
        found.sort(key=lambda block: block.used)
        with self._lock:
            self._oldest_first = deque(found)
            self._bytes = sum(block.bytes for block in found)

    def make_room(self, needed: int) -> None:
        """Remove blocks until *needed* bytes fit beside the others. Raises ``OSError``, and the block it met stays."""
        while (block := self._next_to_go(needed)) is not None:
            folder = self._root.sub(block.namespace).sub(block.name[:2])
            try:
                with (
                    suppress(FileNotFoundError, NotADirectoryError),
                    self._passing_over(ForeignError),
                    folder.opened() as handle,
                ):
                    handle.unlink(block.name)
            except OSError:
                with self._lock:
                    self._oldest_first.appendleft(block)
                    self._bytes += block.bytes
                raise
            self._tidy(block)

    @contextmanager
    def _passing_over(self, why: type[PermissionError]) -> Iterator[None]:
        try:
            yield
        except why as error:
            path = str(error.filename)
            with self._lock:
                is_new = path not in self._passed_over
                self._passed_over.add(path)
            if is_new:
                self._pass_over(path, error.strerror or str(error))

    def _next_to_go(self, needed: int) -> _Block | None:
        with self._lock:
            if self._capacity is None or not self._oldest_first or self._bytes + needed <= self._capacity:
                return None
            block = self._oldest_first.popleft()
            self._bytes -= block.bytes
            return block

    def _tidy(self, block: _Block) -> None:
        """Remove the directories that the block was the last one in, as far as nobody's files are there."""
        namespace = self._root.sub(block.namespace)
        with suppress(OSError), namespace.opened() as handle:
            os.rmdir(block.name[:2], dir_fd=handle.fd)
            if any(FAN_OUT_NAME.fullmatch(entry.name) for entry in handle.entries()):
                return
            os.rmdir("tmp", dir_fd=handle.fd)
            handle.unlink(NAME)
            with self._root.opened() as root:
                os.rmdir(block.namespace, dir_fd=root.fd)

    def _blocks_of(self, name: str) -> list[_Block]:
        namespace = self._root.sub(name)
        found: list[_Block] = []
        if not namespace.sub("tmp").is_there():
            return found
        with suppress(FileNotFoundError, NotADirectoryError), namespace.opened() as handle:
            folders = [entry.name for entry in handle.entries() if FAN_OUT_NAME.fullmatch(entry.name)]
            for folder in folders:
                with self._passing_over(PermissionError), suppress(FileNotFoundError, NotADirectoryError):
                    found += self._blocks_in(namespace.sub(folder))
        return found

    def _blocks_in(self, folder: Folder) -> list[_Block]:
        found: list[_Block] = []
        with folder.opened() as handle:
            for entry in handle.entries():
                if BLOCK_NAME.fullmatch(entry.name) and entry.name.startswith(folder.path.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if handle.problem(status) is None:
                            used = max(status.st_atime, status.st_mtime)
                            namespace = folder.path.parent.name
                            found.append(_Block(namespace, entry.name, status.st_size, used))
        return found
