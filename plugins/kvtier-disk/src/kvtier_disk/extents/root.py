"""A root directory that several processes and namespaces share: opening its index, and keeping index and files in step.

::

    <root>/.kvtier/index-<number>.db   the index, the highest number counts
    <root>/.kvtier/alive/              a locked file for every process at work
    <root>/<namespace>/namespace.json  what the namespace stands for, for people
    <root>/<namespace>/<number>.ext    extents

Decides what becomes of what does not fit together: an extent that only the index knows is forgotten, one that only the
disk knows is taken up, an index that is lost or damaged is made anew from the extents. Never decides what to evict.
"""

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier_core import OffloadKey, Sealer
from kvtier_disk.extents.database import Database, IndexDamagedError, Snapshot
from kvtier_disk.extents.extent_files import ExtentFiles, ExtentLostError
from kvtier_disk.extents.form import HEADER_BYTES, Shape, extent_of, place_of, read_entry, read_header
from kvtier_disk.extents.index import NOBODY, Index
from kvtier_disk.extents.lock import LifeSign, exclusively, is_alive
from kvtier_disk.extents.place import check_namespace, why_not_direct
from kvtier_disk.extents.shared_memory import ALLOCATED_BYTES
from kvtier_disk.extents.tables import ExtentRow, Namespace

_INDEX_NAME = re.compile(r"index-(\d{6})\.db")
_EXTENT_NAME = re.compile(r"([0-9a-f]{10})\.ext")
_OPEN_TIMEOUT_S = 60.0
_MIN_JOURNAL, _MAX_JOURNAL = 256 << 10, 8 << 20


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What a process has of a root that it takes part in, or only looks into: ``owner`` is nobody then."""

    namespace: Namespace
    index: Index
    owner: int
    life_sign: LifeSign | None
    files: ExtentFiles

    @property
    def lock(self) -> str:
        """The name of the sign of life."""
        return "" if self.life_sign is None else self.life_sign.path.name

    def end(self) -> None:
        """Close the index and the files, and give up the sign of life."""
        self.files.close()
        self.index.database.close()
        if self.life_sign is not None:
            self.life_sign.end()


class Root:
    """One root directory, as one tier instance sees it."""

    def __init__(
        self, path: Path, *, capacity: int | None, max_open: int, warn: Callable[[str], None]
    ) -> None:
        """No I/O."""
        self.path = path
        self.home = path / ".kvtier"
        share = _MAX_JOURNAL if capacity is None else capacity // 64
        self.journal_bytes = min(_MAX_JOURNAL, max(_MIN_JOURNAL, share))
        self.direct = False
        self._max_open = max_open
        self._warn = warn
        self._warned: set[str] = set()

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep every other process from opening the root meanwhile. Raises ``OSError``."""
        with exclusively(self.home / "lock", _OPEN_TIMEOUT_S):
            yield

    def warn_once(self, subject: str, text: str) -> None:
        """Warn of something, the first time only."""
        if subject not in self._warned:
            self._warned.add(subject)
            self._warn(text)

    def files_of(self, namespace: Namespace, *, read_only: bool = False) -> ExtentFiles:
        """The extents of a namespace."""
        check_namespace(namespace.name)
        return ExtentFiles(
            self.path / namespace.name,
            namespace.name,
            namespace.row_bytes,
            direct=self.direct,
            read_only=read_only,
            max_open=self._max_open,
            warn_once=self.warn_once,
        )

    # Taking part.

    def join(self, name: str, row_bytes: int, description: Mapping[str, Any]) -> Membership:
        """Take part, with index and files in step. Raises ``OSError``.

        Cost: a look at every extent's file, for all namespaces; much more when the index has to be made anew.
        """
        check_namespace(name)
        with self.exclusively():
            self._find_out_direct()
            index = self.open_index()
            try:
                member = self._take_part(index, name, row_bytes)
            except IndexDamagedError as damage:
                member = self._take_part(self.rebuild(str(damage.strerror)), name, row_bytes)
            self._describe(name, description)
            return member

    def _take_part(self, index: Index, name: str, row_bytes: int) -> Membership:
        """Bring index and files into step, and enter this process. Closes the index when that fails."""
        life_sign: LifeSign | None = None
        try:
            self.reap(index)
            self.reconcile(index)
            life_sign = LifeSign(self.home / "alive")
            (self.path / name).mkdir(exist_ok=True)
            namespace = index.add_namespace(name, row_bytes, time.time())
            owner = index.add_owner(life_sign.path.name, namespace.id)
        except BaseException:
            index.database.close()
            if life_sign is not None:
                life_sign.end()
            raise
        files = self.files_of(namespace)
        return Membership(namespace=namespace, index=index, owner=owner, life_sign=life_sign, files=files)

    def look_in(self, name: str, row_bytes: int) -> Membership | None:
        """Look at what there is without writing anything; ``None`` without an index. Raises ``OSError``."""
        check_namespace(name)
        index = self.snapshot()
        if index is None:
            return None
        try:
            namespace = index.find_namespace(name, row_bytes)
        except BaseException:
            index.database.close()
            raise
        self.direct = self._why_not_direct() is None
        files = self.files_of(namespace, read_only=True)
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
                        self.remove_empty(member.index, {member.namespace.id: member.namespace})
                        self._dismantle(member.index)
        finally:
            member.end()

    def _dismantle(self, index: Index) -> None:
        """Close the index, and remove it if it describes nothing at all."""
        is_empty = not (index.namespaces() or index.owners() or index.extents())
        index.database.close()
        if is_empty:
            shutil.rmtree(self.home)

    def _find_out_direct(self) -> None:
        reason = self._why_not_direct()
        self.direct = reason is None
        if reason is not None:
            self.warn_once(
                "direct", f"no O_DIRECT below {self.path} ({reason}): blocks pass through the page cache"
            )

    def _why_not_direct(self) -> str | None:
        written = next((path for _, path in self._extents_on_disk() if path.is_file()), None)
        return why_not_direct(self.home, written)

    # The index.

    def index_path(self) -> Path | None:
        """Where the index in use is, ``None`` when there is none. Raises ``OSError``."""
        found = (
            [path for path in self.home.iterdir() if _INDEX_NAME.fullmatch(path.name)]
            if self.home.is_dir()
            else []
        )
        return max(found, key=lambda path: path.name, default=None)

    def snapshot(self) -> Index | None:
        """The index for reading alone; ``None`` when there is none. Raises ``OSError``."""
        path = self.index_path()
        if path is None:
            return None
        database = Snapshot(path)
        try:
            return Index(database)
        except BaseException:
            database.close()
            raise

    def open_index(self) -> Index:
        """Open the index, make it if there is none, make it anew if it is damaged. Call it ``exclusively``.

        Raises ``OSError``.
        """
        path = self.index_path()
        if path is None:
            if any(self._extents_on_disk()):
                return self.rebuild("it is lost")
            return self._open(self.home / "index-000001.db")
        try:
            index = self._open(path)
            try:
                index.database.check()
            except BaseException:
                index.database.close()
                raise
        except IndexDamagedError as damage:
            return self.rebuild(str(damage.strerror))
        return index

    def _open(self, path: Path) -> Index:
        database = Database(path, journal_bytes=self.journal_bytes)
        try:
            return Index(database)
        except BaseException:
            database.close()
            raise

    def rebuild(self, why: str) -> Index:
        """Make a new index from what the extents hold. Call it ``exclusively``. Raises ``OSError``.

        Processes that still use the old one notice the new one at their next ``follow``. Cost: one small read for every
        slot that was ever used.
        """
        last = self.index_path()
        number = 1 + (int(last.stem.partition("-")[2]) if last is not None else 0)
        path = self.home / f"index-{number:06}.db"
        draft = self.home / "index.draft"
        for leftover in (draft, Path(f"{draft}-wal"), Path(f"{draft}-shm")):
            leftover.unlink(missing_ok=True)
        index = self._open(draft)
        try:
            extents, blocks = self._take_up_all(index)
        finally:
            index.database.close()
        draft.rename(path)
        self._remove_indexes_before(number)
        self._warn(f"made the index anew from {extents} extents with {blocks} blocks, because {why}")
        return self._open(path)

    def _remove_indexes_before(self, number: int) -> None:
        for path in self.home.iterdir():
            match = re.match(r"index-(\d{6})\.db", path.name)
            if match is not None and int(match[1]) < number:
                with suppress(OSError):
                    path.unlink()

    # Index and files.

    def can_be_written(self) -> bool:
        """Whether files can be made and locked here, and there is room to open the index. Raises no error."""
        probe = self.home / "probe"
        try:
            with self.exclusively():
                try:
                    probe.write_bytes(bytes(2 * ALLOCATED_BYTES))
                finally:
                    probe.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def reap(self, index: Index, member: Membership | None = None) -> None:
        """Free what dead processes had claimed; *member* lives, whatever its lock says. Raises ``OSError``."""
        owners = dict(index.owners())
        if member is not None and owners.pop(member.owner, None) is None:
            index.restore_owner(member.owner, member.lock, member.namespace.id)
        for owner, lock in owners.items():
            path = self.home / "alive" / Path(lock).name
            if not is_alive(path):
                index.remove_owner(owner)
                path.unlink(missing_ok=True)

    def reconcile(self, index: Index) -> None:
        """Bring index and files into step, for all namespaces. Call it ``exclusively``. Raises ``OSError``."""
        namespaces = index.namespaces()
        rows = {row.id: row for row in index.extents()}
        on_disk: dict[int, tuple[Path, int]] = {}
        for extent, path in self._extents_on_disk():
            on_disk[extent] = (path, path.lstat().st_size)
        for row in rows.values():
            _, size = on_disk.get(row.id, (None, -1))
            if (row.is_ready and size < row.bytes) or (not row.is_ready and row.owner is None):
                if row.namespace not in namespaces:
                    raise index.database.damaged(f"extent {row.id} is in no namespace")
                self.take_away(index, row, namespaces[row.namespace], owner=None)
        unknown = [(extent, path) for extent, (path, _) in on_disk.items() if extent not in rows]
        if unknown:
            self._take_up(index, unknown)
        self.remove_empty(index, namespaces)

    def take_away(self, index: Index, row: ExtentRow, namespace: Namespace, *, owner: int | None) -> bool:
        """Remove an extent: first from the index, then from the disk, then from the count. False if it is in use."""
        if not index.empty_extent(row.id, owner, only_idle=owner is not None):
            return False
        self.files_of(namespace).remove(row.id)
        index.drop_extent(row.id)
        return True

    def remove_empty(self, index: Index, namespaces: Mapping[int, Namespace]) -> None:
        """Remove the directories of namespaces that hold nothing and that nobody uses. Raises ``OSError``."""
        removed = set(index.remove_namespaces(namespaces))
        left = {namespace.name for id_, namespace in namespaces.items() if id_ not in removed}
        for id_ in removed:
            name = namespaces[id_].name
            if name not in left:
                directory = self.path / name
                with suppress(OSError):  # somebody's files are in it, or it is gone
                    (directory / "namespace.json").unlink(missing_ok=True)
                    directory.rmdir()

    def _extents_on_disk(self) -> Iterator[tuple[int, Path]]:
        for directory in sorted(self.path.iterdir()):
            if directory.name.startswith(".") or directory.is_symlink() or not directory.is_dir():
                continue
            for path in sorted(directory.iterdir()):
                match = _EXTENT_NAME.fullmatch(path.name)
                if match is not None:
                    yield int(match[1], 16), path

    def _take_up_all(self, index: Index) -> tuple[int, int]:
        return self._take_up(index, list(self._extents_on_disk()))

    def _take_up(self, index: Index, extents: list[tuple[int, Path]]) -> tuple[int, int]:
        """Enter extents that the index does not know, with the blocks whose proofs name what the table says."""
        shapes: list[tuple[int, Shape, str]] = []
        for extent, path in extents:
            shape = _identify(extent, path)
            if shape is None:
                self._warn(f"{path} is no extent of its namespace, or damaged: removed")
                with suppress(OSError):
                    path.unlink()
            else:
                shapes.append((extent, shape, path.parent.name))
        newest: dict[tuple[str, int, OffloadKey], tuple[float, int]] = {}
        for extent, shape, name in shapes:
            for key, place, at in self._survey(extent, shape, name):
                slot = (name, shape.row_bytes, key)
                newest[slot] = max(newest.get(slot, (at, place)), (at, place))
        by_extent: dict[int, list[tuple[OffloadKey, int, float]]] = {}
        for (_, _, key), (at, place) in newest.items():
            by_extent.setdefault(extent_of(place), []).append((key, place, at))
        for extent, shape, name in shapes:
            namespace = index.add_namespace(name, shape.row_bytes, 0.0)
            index.adopt_extent(extent, namespace.id, shape.slots, shape.file_bytes, by_extent.get(extent, []))
        return len(shapes), len(newest)

    def _survey(self, extent: int, shape: Shape, name: str) -> Iterator[tuple[OffloadKey, int, float]]:
        files = self.files_of(Namespace(id=0, name=name, row_bytes=shape.row_bytes), read_only=True)
        sealer = Sealer(name)
        try:
            _, found = files.survey(extent)
        except (ExtentLostError, OSError):
            return
        finally:
            files.close()
        for slot, (entry, tail) in enumerate(found):
            known = read_entry(entry)
            if known is not None and sealer.names(known[0], tail):
                yield known[0], place_of(extent, slot), known[1]

    # A namespace's directory.

    def _describe(self, name: str, description: Mapping[str, Any]) -> None:
        """Put *description* beside the extents, unless it is there."""
        path = self.path / name / "namespace.json"
        text = json.dumps(description, indent=2, sort_keys=True, default=str) + "\n"
        with suppress(OSError, UnicodeDecodeError):
            if stat.S_ISREG(path.lstat().st_mode) and path.read_text() == text:
                return
        draft = self.home / f"namespace-{os.getpid()}.draft"
        try:
            draft.write_text(text)
            draft.rename(path)
        except OSError as error:
            self._warn(f"can't write namespace.json: {error.strerror or error}. Only people read it")

    def remove_directory(self, name: str) -> None:
        """Remove a namespace's directory with all that is in it. Raises ``OSError``."""
        shutil.rmtree(self.path / name)


def _identify(extent: int, path: Path) -> Shape | None:
    """The shape of an extent that is what its name and directory say, and whole."""
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with path.open("rb") as file:
            header = read_header(file.read(HEADER_BYTES))
        if header is None or header[0] != extent or header[2] != path.parent.name:
            return None
        return header[1] if path.stat().st_size >= header[1].file_bytes else None
    except OSError:
        return None
