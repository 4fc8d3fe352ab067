"""A root directory that several processes and namespaces share: opening its index, and keeping index and files in step.

::

    <root>/.kvtier/index-<number>.db   the index (``index_files``)
    <root>/.kvtier/alive/              a locked file for every process at work
    <root>/<namespace>/namespace.json  what the namespace stands for, for people
    <root>/<namespace>/<number>.ext    extents

Decides what becomes of what does not fit together: an extent that only the index knows is forgotten, one that only the
disk knows is entered, an index that is lost or damaged is made anew from the extents. Never decides what to evict.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvtier_disk import description as descriptions
from kvtier_disk.extents.adoption import adopt
from kvtier_disk.extents.extent_files import ExtentFiles
from kvtier_disk.extents.found import FoundExtent, find_extents, identify
from kvtier_disk.extents.index import NOBODY, Index
from kvtier_disk.extents.index_files import IndexFiles
from kvtier_disk.extents.lock import LifeSign, exclusively
from kvtier_disk.extents.membership import Membership
from kvtier_disk.extents.place import (
    RootRefusedError,
    check_namespace,
    check_syncs,
    probe_writing,
    refuse_foreign,
    why_not_direct,
)
from kvtier_disk.extents.signs import SignsOfLife
from kvtier_disk.extents.statements import IndexDamagedError, index_gone
from kvtier_disk.extents.tables import ExtentRow, Namespace
from kvtier_disk.folder import Folder

_OPEN_TIMEOUT_S = 60.0
_HOLD_TIMEOUT_S = 5.0  # a store waits for it
_PROBE_BYTES = 128 << 10  # more than the transactions of a start write
_MIN_JOURNAL, _MAX_JOURNAL = 256 << 10, 8 << 20


class Root:
    """One root directory, as one tier instance sees it."""

    def __init__(
        self, folder: Folder, *, capacity: int | None, max_open: int, warn: Callable[[str], None]
    ) -> None:
        """No I/O."""
        self.folder = folder
        self.path = folder.path
        self.home = folder.sub(".kvtier")
        self.signs = SignsOfLife(self.home.sub("alive"))
        share = _MAX_JOURNAL if capacity is None else capacity // 64
        self.journal_bytes = min(_MAX_JOURNAL, max(_MIN_JOURNAL, share))
        self.indexes = IndexFiles(self.home, journal_bytes=self.journal_bytes)
        self.direct = False
        self._max_open = max_open
        self._warn = warn
        self._warned: set[str] = set()
        self._is_held_up = False  # somebody kept the root's lock for too long, at the last try

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other processes from opening the root meanwhile. Raises what ``join`` does."""
        refuse_foreign(self.folder, self.home)
        with exclusively(self.home, _OPEN_TIMEOUT_S):
            yield

    @contextmanager
    def keeping(self, index: Index) -> Iterator[None]:
        """Keep the index what it is meanwhile: nobody opens the root, or makes the index anew.

        What is numbered by an index, or told by it to be unused, is so only as long as it is the root's. Raises
        ``OSError``: ``ESTALE`` when another index has taken its place, ``ETIMEDOUT`` when another process keeps the
        lock for 5 s; who comes after that does not wait again, so that many stores don't add up their waits.
        """
        # At first without the lock: in the empty place of a root that is not mounted, no file may be made for it.
        self.check_in_use(index)
        with ExitStack() as held:
            try:
                held.enter_context(exclusively(self.home, 0.0 if self._is_held_up else _HOLD_TIMEOUT_S))
            except TimeoutError:
                self._is_held_up = True
                raise
            self._is_held_up = False
            self.check_in_use(index)
            yield

    def is_in_use(self, index: Index) -> bool:
        """Whether this is still the root's index, and the root has its number. Raises ``OSError``."""
        database = index.database
        return self.indexes.path() == database.path and database.is_in_place and self._is_root_of(index)

    def check_in_use(self, index: Index) -> None:
        """Raises ``OSError``, ``ESTALE`` when this is the root's index no more."""
        if not self.is_in_use(index):
            raise index_gone(self.path)

    def warn_once(self, subject: str, text: str) -> None:
        """Warn of something, the first time only."""
        if subject not in self._warned:
            self._warned.add(subject)
            self._warn(text)

    def files_of(
        self, namespace: Namespace, *, read_only: bool = False, known_by: Index | None = None
    ) -> ExtentFiles:
        """The extents of a namespace; with *known_by* none is opened once that index's root has been moved away."""
        check_namespace(namespace.name)
        return ExtentFiles(
            self.folder.sub(namespace.name),
            namespace.name,
            namespace.row_bytes,
            direct=self.direct,
            read_only=read_only,
            max_open=self._max_open,
            warn_once=self.warn_once,
            check_root=None if known_by is None else partial(self._check_is_root_of, known_by),
        )

    def _check_is_root_of(self, index: Index) -> None:
        """Raises ``OSError``, ``ESTALE`` where another root has come to stand: its slots hold what others know."""
        if not self._is_root_of(index):
            raise OSError(
                errno.ESTALE,
                "the root was moved away and another one is in its place, or its number was changed; this tier changes"
                " over within `refresh`",
                str(self.path),
            )

    def _is_root_of(self, index: Index) -> bool:
        return self.indexes.identity() in (0, index.root)

    # Taking part.

    def join(self, name: str, row_bytes: int, description: Mapping[str, Any]) -> Membership:
        """Take part, with index and files in step. Raises ``OSError``, ``RootRefusedError`` as ``refuse_foreign`` does.

        Cost: a look at every extent's file, for all namespaces; much more when the index has to be made anew.
        """
        check_namespace(name)
        refuse_foreign(self.folder, self.home, self.signs.folder, self.folder.sub(name))
        with self.exclusively():
            check_syncs(self.home)
            self._find_out_direct()
            index = self.open_index()
            try:
                member = self._take_part(index, name, row_bytes, description)
            except IndexDamagedError as damage:
                index = self.rebuild(str(damage.strerror))
                member = self._take_part(index, name, row_bytes, description)
            return member

    def _take_part(
        self, index: Index, name: str, row_bytes: int, description: Mapping[str, Any]
    ) -> Membership:
        """Bring index and files into step, and enter this process. Closes the index when that fails."""
        life_sign: LifeSign | None = None
        try:
            self.signs.reap(index)
            self.signs.sweep(index)
            self.reconcile(index)
            life_sign = self.signs.make()
            self._make_directory(name, description)
            namespace = index.add_namespace(name, row_bytes, time.time())
            owner = index.add_owner(life_sign.name, namespace.id)
        except BaseException:
            index.database.close()
            if life_sign is not None:
                life_sign.end()
            raise
        files = self.files_of(namespace, known_by=index)
        return Membership(namespace=namespace, index=index, owner=owner, life_sign=life_sign, files=files)

    def look_in(self, name: str, row_bytes: int) -> Membership | None:
        """Look at what there is without writing anything; ``None`` without an index. Raises ``OSError``."""
        check_namespace(name)
        refuse_foreign(self.folder, self.home, self.folder.sub(name))
        index = self.indexes.snapshot()
        if index is None:
            return None
        try:
            namespace = index.find_namespace(name, row_bytes)
        except BaseException:
            index.database.close()
            raise
        self.direct = self._why_not_direct() is None
        files = self.files_of(namespace, read_only=True, known_by=index)
        return Membership(namespace=namespace, index=index, owner=NOBODY, life_sign=None, files=files)

    def leave(self, member: Membership, *, remove: bool) -> None:
        """Take part no more; with *remove* nothing stays of a namespace that holds nothing. Raises ``OSError``."""
        try:
            if member.owner != NOBODY:
                # A full disk or a damaged index: without its sign of life the owner is found dead by who comes next.
                with suppress(OSError):
                    member.index.remove_owner(member.owner)
                if remove:
                    with self.exclusively():
                        self.clear(member.index)
                        self._dismantle(member.index)
        finally:
            member.end()

    def _dismantle(self, index: Index) -> None:
        """Close the index, and remove it if it describes nothing at all."""
        is_empty = not (index.namespaces() or index.owners() or index.extents())
        index.database.close()
        if is_empty:
            self.remove_directory(self.home.path.name)

    def _find_out_direct(self) -> None:
        reason = self._why_not_direct()
        self.direct = reason is None
        if reason is not None:
            self.warn_once(
                "direct", f"no O_DIRECT below {self.path} ({reason}): blocks pass through the page cache"
            )

    def _why_not_direct(self) -> str | None:
        written = next(self._find(), None)
        return why_not_direct(*(self.home, None) if written is None else (written.folder, written.name))

    # The index.

    def is_one(self) -> bool:
        """Whether there is anything of a disk tier below the path: the index's directory, or an extent."""
        return self.home.is_there() or any(identify(found)[0] is not None for found in self._find())

    def open_index(self) -> Index:
        """Open the index, make it if there is none, make it anew if it is damaged. Call it ``exclusively``.

        Raises ``OSError``, and ``RootRefusedError`` where an earlier version of kvtier is at work.
        """
        self.refuse_earlier()
        path = self.indexes.path()
        self.indexes.remove_unused(path)
        if path is None:
            if next(self._find(), None) is not None:
                return self.rebuild("it is lost")
            return self.indexes.replace(lambda _: None)[0]
        try:
            index = self.indexes.open(path)
            try:
                index.database.check()
            except BaseException:
                index.database.close()
                raise
        except IndexDamagedError as damage:
            return self.rebuild(str(damage.strerror))
        return index

    def refuse_earlier(self) -> None:
        """Raises ``RootRefusedError`` where engines of an earlier version are at work: they keep a write-ahead log.

        Call it ``exclusively``.
        """
        path = self.indexes.path()
        if path is not None and self.indexes.has_log(path) and self.signs.anybody():
            raise RootRefusedError(
                f"engines of an earlier version of kvtier are at work in root {str(self.path)!r}, and can't share their"
                f" index ({path.name}) with this version: stop all engines that use this root, then start again; or set"
                " another root"
            )

    def rebuild(self, why: str) -> Index:
        """Make a new index from what the extents hold. Call it ``exclusively``. Raises ``OSError``.

        Processes that still use the old one notice the new one at their next ``follow``. Cost: one small read for every
        slot that was ever used.
        """
        newest_first = sorted(self._find(), key=lambda found: found.changed, reverse=True)
        index, (extents, blocks) = self.indexes.replace(lambda draft: self._adopt(draft, newest_first))
        self._warn(f"made the index anew from {extents} extents with {blocks} blocks, because {why}")
        return index

    # Index and files.

    def why_not_written(self, name: str) -> OSError | None:
        """Why no files can be made here or in the namespace *name*, or locked, or there is no room for the index.

        ``None`` where all of that can be done. Raises no error.
        """
        try:
            with self.exclusively():
                probe_writing(self.home, _PROBE_BYTES)
                probe_writing(self.folder.sub(name), 0)
        except RootRefusedError as refused:
            return OSError(errno.EPERM, str(refused), str(self.path))
        except OSError as error:
            return error
        return None

    def reconcile(self, index: Index) -> None:
        """Bring index and files into step, for all namespaces. Call it ``exclusively``. Raises ``OSError``."""
        namespaces = index.namespaces()
        rows: dict[tuple[str, int], ExtentRow] = {}
        for row in index.extents():
            rows[self._namespace_of(index, row, namespaces).name, row.id] = row
        on_disk = {found.id: found for found in self._find({name for name, _ in rows})}
        lost: list[Path] = []
        for id_, row in rows.items():
            size = on_disk[id_].bytes if id_ in on_disk else -1
            if row.is_ready and size < row.bytes:
                lost.append(self.files_of(namespaces[row.namespace]).path_of(row.id))
                self.take_away(index, row, owner=None)
        if lost:
            self.tell_lost(lost)
        unknown = [found for id_, found in on_disk.items() if id_ not in rows]
        if unknown:
            self._adopt(index, unknown, {row.id for row in index.extents()})
        self.clear(index)

    def tell_lost(self, extents: Sequence[Path]) -> None:
        """Warn of extents that went while the index still counted on them."""
        self._warn(
            f"{len(extents)} extents were removed or are not what they were: their blocks are gone, and their room is"
            f" given back. The first one is {extents[0]}"
        )

    def heal_directory(self, member: Membership, description: Mapping[str, Any]) -> None:
        """Make a namespace's directory again if it is gone, and forget what was in it.

        Raises ``OSError``; ``RootRefusedError`` when something else has its name.
        """
        if self.folder.sub(member.namespace.name).is_there():
            return
        with self.keeping(member.index):
            self._make_directory(member.namespace.name, description)
            self.reconcile(member.index)
        self._warn(f"{self.path / member.namespace.name} was gone, with all blocks in it: made again")

    def take_away(self, index: Index, row: ExtentRow, *, owner: int | None) -> bool:
        """Remove an extent: first from the index, then from the disk, then from the count. False if it is in use."""
        namespace = self._namespace_of(index, row, index.namespaces())
        if not index.empty_extent(row.id, owner, only_idle=owner is not None):
            return False
        self.files_of(namespace).remove(row.id)
        index.drop_extent(row.id)
        return True

    def clear(self, index: Index) -> None:
        """Remove what is left of extents that nobody finished, and of namespaces that hold nothing and nobody uses.

        Call it ``exclusively``: nobody makes an extent meanwhile, and who joins must not find the directory it has made
        gone. An extent that its owner is removing just now may be removed twice. Raises ``OSError``.
        """
        for row in index.extents():
            if not row.is_ready:
                self.take_away(index, row, owner=None)
        removed = {namespace.name for namespace in index.remove_namespaces()}
        for name in removed - {namespace.name for namespace in index.namespaces().values()}:
            with suppress(OSError), self.folder.opened() as root:  # somebody's files are in it, or it is gone
                with self.folder.sub(name).opened() as directory:
                    directory.unlink(descriptions.NAME)
                os.rmdir(name, dir_fd=root.fd)

    @staticmethod
    def _namespace_of(index: Index, row: ExtentRow, namespaces: Mapping[int, Namespace]) -> Namespace:
        """Raises ``IndexDamagedError`` for an extent that is nobody's."""
        namespace = namespaces.get(row.namespace)
        if namespace is None:
            raise index.database.damaged(f"extent {row.id} is in no namespace")
        return namespace

    def _find(self, known: Collection[str] = ()) -> Iterator[FoundExtent]:
        return find_extents(self.folder, known, self.warn_once)

    def _adopt(self, index: Index, found: list[FoundExtent], taken: Collection[int] = ()) -> tuple[int, int]:
        return adopt(index, found, taken, partial(self.files_of, read_only=True), self._warn)

    # A namespace's directory.

    def _make_directory(self, name: str, description: Mapping[str, Any]) -> None:
        """Make a namespace's directory, described. Raises ``OSError``, and ``RootRefusedError`` for a link."""
        folder = self.folder.sub(name)
        folder.make()
        refuse_foreign(folder)
        try:
            with folder.opened() as directory, self.home.opened() as drafts:
                descriptions.describe(directory, description, drafts)
        except OSError as error:
            self._warn(f"can't write namespace.json: {error.strerror or error}. Only people read it")

    def remove_directory(self, name: str) -> None:
        """Remove a directory in the root with all that is in it. Raises ``OSError``."""
        with self.folder.opened() as root:
            shutil.rmtree(name, dir_fd=root.fd)
