"""The disk tier with ``layout = "files"``: one file a block, for file systems on which extents can't be used.

How blocks lie on the disk is ``FileLayout``'s; capacity, eviction and threads are the core's.
"""

import errno
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from kvtier_core import TierOpenError
from kvtier_core.tier import BlockInfo, BlockTier, OffloadKey, TierContext, TierInfo, format_size
from kvtier_disk.extents.bounds import min_free_of
from kvtier_disk.extents.place import (
    NOT_WRITABLE,
    ONLY_SERVED,
    RootRefusedError,
    check_namespace,
    open_root,
    refuse_foreign,
)
from kvtier_disk.folder import Folder
from kvtier_disk.layout import FileLayout
from kvtier_disk.others import OtherNamespaces
from kvtier_disk.settings import DEFAULT_CAPACITY, DiskSettings
from kvtier_disk.strangers import Strangers


class FilesTier(BlockTier):
    """Blocks as files below ``root``, kept within ``capacity`` by the core (16 GiB where it is unset)."""

    Settings = DiskSettings
    info = TierInfo(medium="disk", persistent=True, default_capacity=DEFAULT_CAPACITY)

    settings: DiskSettings

    def __init__(self, settings: DiskSettings, context: TierContext) -> None:
        """Keep both; no I/O."""
        super().__init__(settings, context)
        self.stores_nothing = settings.read_only
        self._root = Folder(settings.root.absolute(), shared=settings.allow_writable_by_others)
        self._others = OtherNamespaces(self._root, context.namespace, context.capacity_bytes, self._pass_over)
        self._held: set[OffloadKey] = set()
        self._lock = threading.Lock()  # guards what is held
        self._strangers = Strangers(context.log, context.name)
        self._layout = FileLayout(
            self._root,
            context.namespace,
            context.row_bytes,
            self._strangers.note,
            description=context.description,
            read_only=settings.read_only,
        )

    def open(self) -> None:
        """Make what is missing and remove what dead writers left. Raises ``TierOpenError``.

        A namespace that is there is served although nothing can be written (a full disk, a read-only root): one
        warning says so, and stores fail as they come.
        """
        try:
            self._check()
            if self.settings.read_only:
                return
            self._layout.make()
        except RootRefusedError as error:
            raise TierOpenError(f"tier {self.context.name!r} (kvtier-disk): {error}") from error
        except OSError as error:
            raise TierOpenError(
                f"tier {self.context.name!r} (kvtier-disk): can't write below root {str(self.settings.root)!r}: "
                f"{error.strerror or error}; set root to a directory on a writable local disk"
            ) from error
        try:
            self._layout.prepare()
            self._others.learn()
        except OSError as error:
            if not self._may_not_write(error):
                self._warn("can't write", error, "Its blocks are served; stores fail as long as that lasts.")
            return
        try:
            self._layout.describe()
        except OSError as error:
            self._warn("can't write namespace.json", error, "Only people read it.")

    def _check(self) -> None:
        check_namespace(self.context.namespace)
        open_root(self._root, layout="files", read_only=self.settings.read_only)
        refuse_foreign(self._root.sub(self.context.namespace))
        refuse_foreign(*self._layout.folders())

    def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Which of *keys* are stored. Raises ``OSError``."""
        return [self._layout.has(key) for key in keys]

    def store(self, key: OffloadKey, block: memoryview) -> None:
        """Write one block. Raises ``OSError``, such as ``ENOSPC``, and then it is not there."""
        if self.settings.min_free != 0:
            self._check_room(len(block))
        with self._lock:
            self._held.add(key)
            needed = len(self._held) * self.context.row_bytes
        try:
            self._others.make_room(needed)
            self._layout.put(key, block)
        except BaseException as error:
            self._let_go(key)
            if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
                self._try_writing()
            raise

    def _try_writing(self) -> None:
        """Find out whether one block alone can't be written, or nothing can."""
        try:
            self._layout.prepare()
        except OSError as error:
            self._may_not_write(error)

    def _may_not_write(self, error: OSError) -> bool:
        """Whether *error* says that nothing may be written: the core is told to store nothing then, and people once."""
        if error.errno not in NOT_WRITABLE:
            return False
        if not self.stores_nothing:
            self.stores_nothing = True
            self._warn("can't write", error, f"{ONLY_SERVED}. To store, allow writing, and start again.")
        return True

    def _check_room(self, size: int) -> None:
        status = os.statvfs(self._root.path)
        free = status.f_bavail * status.f_frsize
        min_free = min_free_of(status, self.settings.min_free)
        # Of a read-only file system the write itself says more.
        if free - size < min_free and not status.f_flag & os.ST_RDONLY:
            raise OSError(
                errno.ENOSPC,
                f"no room: the disk has {format_size(free)} free, and {format_size(min_free)} (min_free) stay free",
            )

    def load(self, key: OffloadKey, into: memoryview) -> bool:
        """Read one block; a file that is too short or too long is absent, and goes. Raises ``OSError``."""
        is_there = self._layout.get(key, into)
        if not is_there:
            self._let_go(key)
        return is_there

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Remove blocks. Raises ``OSError``."""
        for key in keys:
            self._layout.remove(key)
            self._let_go(key)

    def _let_go(self, key: OffloadKey) -> None:
        with self._lock:
            self._held.discard(key)

    def mark_used(self, marks: Mapping[OffloadKey, float]) -> None:
        """Note when blocks were used, as their files' time of access."""
        for key, time in marks.items():
            self._layout.mark_used(key, time)

    def close(self) -> None:
        """Nothing is kept open; what was found in the places of blocks is summed up."""
        self._strangers.sum_up()

    def remove_namespace(self) -> None:
        """Remove the namespace's directory. Raises ``OSError``."""
        self._layout.remove_all()

    def scan(self) -> Iterable[BlockInfo]:
        """Every stored block of the namespace. Raises ``OSError``."""
        for block in self._layout.scan():
            self._held.add(block.key)
            yield block
        if not self.settings.read_only:
            with suppress(
                OSError
            ):  # storage that can't be written serves; the first store that needs room tries again
                self._others.make_room(len(self._held) * self.context.row_bytes)

    def _pass_over(self, path: str, problem: str) -> None:
        self.context.log.warning(
            "tier %r (kvtier-disk): %s is passed over: %s", self.context.name, path, problem
        )

    def _warn(self, what: str, error: OSError, consequence: str) -> None:
        self.context.log.warning(
            "tier %r (kvtier-disk): %s in %s: %s. %s",
            self.context.name,
            what,
            self._root.path / self.context.namespace,
            error.strerror or error,
            consequence,
        )
