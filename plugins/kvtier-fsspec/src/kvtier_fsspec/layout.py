"""Where blocks lie below the URL: one object a block, the whole key in its name.

::

    <url>/<namespace>/namespace.json        what the namespace stands for, and until when it is in use
    <url>/<namespace>/<2 hex>/<key hex>.kv  a block; the whole key, group index included, is its name

Decides names and sizes. How an object is published is the publisher's business, which fault is which the tier's.
"""

import logging
import re
import time
from collections.abc import Iterable, Sequence

from fsspec import AbstractFileSystem

from kvtier_core.tier import BlockInfo, OffloadKey
from kvtier_fsspec.connection import Connection
from kvtier_fsspec.many import Requests
from kvtier_fsspec.publishing import Publisher, remove_each, sizes

BLOCK_NAME = re.compile(r"(?:.*/)?([0-9a-f]{2})/(\1(?:[0-9a-f]{2})*)\.kv")

LONGEST_SCAN_S = 30.0
"""A quarter of the time that tiers have to open by default: a larger storage must not keep the engine from starting."""


class ObjectLayout:
    """The blocks of one namespace. Stateless: safe from any thread and beside other processes.

    Every method raises ``StorageError`` for a fault of the storage.
    """

    def __init__(
        self,
        connection: Connection,
        publisher: Publisher,
        namespace: str,
        *,
        block_bytes: int,
        requests: Requests,
        log: logging.Logger,
    ) -> None:
        """Blocks of *block_bytes*. No I/O."""
        self._connection = connection
        self._publisher = publisher
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._requests = requests
        self._log = log

    def have(self, keys: Sequence[OffloadKey], *, whole: bool = False) -> list[bool | Exception]:
        """Which blocks are there, in any size or *whole*; a ``StorageError`` for each that could not be asked about."""
        found = self._connection.call_each(
            lambda fs, root: sizes(fs, self._paths(root, keys), self._requests)
        )
        return [
            size if isinstance(size, Exception) else size == self._block_bytes if whole else size is not None
            for size in found
        ]

    def put(self, key: OffloadKey, block: memoryview) -> None:
        """Store a block, replacing one of that name."""
        content = bytes(block)  # file systems take nothing else, and may keep it
        self._connection.call(lambda fs, root: self._publisher.put(fs, self._path(root, key), content))

    def get(self, key: OffloadKey, into: memoryview) -> bool:
        """Fill *into*; false when there is no such block.

        An object of another size gives zeros, which prove nothing: the core counts it as damaged. One byte more than a
        block has is read, so that a longer object is found out and never read whole.
        """
        content = self._connection.call(lambda fs, root: self._read(fs, self._path(root, key)))
        if content is None:
            return False
        into[:] = content if len(content) == len(into) else bytes(len(into))
        return True

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks; absent ones are fine."""
        self._connection.call(lambda fs, root: remove_each(fs, self._paths(root, keys), self._requests))

    def remove_all(self) -> None:
        """Remove the namespace."""
        self._connection.call(lambda fs, root: self._publisher.remove_all(fs, f"{root}/{self._namespace}"))

    def scan(self, *, may_remove: bool) -> Iterable[BlockInfo]:
        """Every block, or as many as half a minute is enough for: what is not listed is told in the log.

        What writers left half-written an hour ago or longer is removed, if anything may be. So is an object that has a
        block's name and not its size; the log says how many.
        """
        return self._connection.call(lambda fs, root: self._scan(fs, root, may_remove=may_remove))

    def _scan(self, fs: AbstractFileSystem, root: str, *, may_remove: bool) -> list[BlockInfo]:
        blocks: list[BlockInfo] = []
        damaged: list[str] = []
        leftovers: list[str] = []
        give_up = time.monotonic() + LONGEST_SCAN_S
        for found in self._publisher.entries(fs, f"{root}/{self._namespace}"):
            if time.monotonic() > give_up:
                self._log.warning(
                    "the start has listed %d stored blocks in %.0f s and goes on: the others are found when they are "
                    "asked for, but don't count within capacity. Remove namespaces and blocks that nobody needs, or "
                    "set a lifecycle rule on the storage",
                    len(blocks),
                    LONGEST_SCAN_S,
                )
                break
            match = BLOCK_NAME.fullmatch(found.path)
            if match is None:
                if found.is_leftover:
                    leftovers.append(found.path)
            elif found.size == self._block_bytes:
                key = OffloadKey(bytes.fromhex(match[2]))
                blocks.append(BlockInfo(key=key, bytes=found.size, time=found.time))
            else:
                damaged.append(found.path)
        if damaged:
            self._log.warning(
                "%d stored blocks are damaged, they have another size than %d bytes (first %s): they are %s",
                len(damaged),
                self._block_bytes,
                damaged[0].rpartition("/")[2],
                "removed" if may_remove else "not served",
            )
        if may_remove:
            remove_each(fs, [*damaged, *leftovers], self._requests)
        return blocks

    def _read(self, fs: AbstractFileSystem, path: str) -> bytes | None:
        try:
            content: bytes = fs.cat_file(path, start=0, end=self._block_bytes + 1)
        except FileNotFoundError:
            return None
        return content

    def _paths(self, root: str, keys: Iterable[OffloadKey]) -> list[str]:
        return [self._path(root, key) for key in keys]

    def _path(self, root: str, key: OffloadKey) -> str:
        name = key.hex()
        return f"{root}/{self._namespace}/{name[:2]}/{name}.kv"
