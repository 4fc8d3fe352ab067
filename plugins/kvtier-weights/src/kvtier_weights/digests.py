"""Digests of weights (contract C02): which files of a model count, and what they hold.

Every byte is read, once: what a file held is remembered in the user's cache directory for as long as the file is the
same one, unchanged. Decides when a remembered digest holds. Digests are xxh3-128: they tell models apart, not forgers.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import xxhash

from kvtier_core.tier import format_size

_log = logging.getLogger("kvtier.weights")

_EDGE_BYTES = 1 << 20
_READ_BYTES = 1 << 23
_MAX_REMEMBERED = 10_000
"""Files whose digests are remembered; past that those not needed for longest are forgotten."""
_SETTLED_NS = 2_000_000_000
"""A file that changed less than this ago may change again without a new time stamp: its digest is not remembered."""
_PATIENCE_S = 60.0
"""How long to wait for a process that reads the same file: it may be stopped, or have left a child with the lock."""
_POLL_S = 0.05

_DOCUMENTS = frozenset({".md", ".rst", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".log"})
"""Endings of files in a model's directory that no loader reads. All others may be weights, settings or code."""
_LEFT_OUT = "__pycache__"

FileLook = list[int | str]
"""A file's path, inode, size, and the times of its last change."""


def list_model_files(directory: Path) -> list[Path]:
    """The files of a model's directory, and of those in it, that its KV may depend on: weights, settings and code.

    All but documents and what is hidden. Links are followed. Cost: a look at each file's entry.
    """
    return sorted(_walk(directory, set()))


def _walk(directory: Path, seen: set[Path]) -> Iterator[Path]:
    real = directory.resolve()
    if real in seen:
        return
    seen.add(real)
    for path in sorted(directory.iterdir()):  # of a directory with two names, the same one everywhere
        if path.name.startswith(".") or path.name == _LEFT_OUT:
            continue
        if path.is_dir():
            yield from _walk(path, seen)
        elif path.is_file() and path.suffix.lower() not in _DOCUMENTS:
            yield path


def digest_weights(files: Iterable[Path], *, root: Path | None = None, edges: bool = False) -> str:
    """Digest *files*: of each its name, its size and every byte; with *edges* its first and last MiB alone.

    Files are named by their path below *root*, or by their last part: where a model lies does not count. *edges* is
    quick and trusting: it misses what differs in the middle, such as a fine-tune of some layers in one large file.

    Cost: one read of a file that is new or has changed; what it held is remembered in ``$XDG_CACHE_HOME/kvtier``
    (``~/.cache/kvtier``) under its path, inode, size and times, but for files of read-only images, whose times tell
    nothing. Two small reads a file with *edges*. Blocks meanwhile, also while another process reads the same file; any
    thread. Raises ``OSError`` when a file can't be read.
    """
    total = hashlib.sha256(b"edges" if edges else b"every byte, xxh3-128")
    forgotten: list[tuple[Path, Exception]] = []
    named = sorted((path.name if root is None else path.relative_to(root).as_posix(), path) for path in files)
    for name, path in named:
        content = _edges(path) if edges else _remembered(path, forgotten)
        total.update(json.dumps([name, path.stat().st_size, content]).encode())
    if forgotten:
        path, error = forgotten[0]
        _log.warning(
            "%s is read as a whole at every start, since its digest can't be remembered: %s; set XDG_CACHE_HOME to a "
            "directory that can be written",
            path if len(forgotten) == 1 else f"each of {len(forgotten)} files, such as {path},",
            error,
        )
    return total.hexdigest()


def _edges(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(_EDGE_BYTES)
        file.seek(max(0, path.stat().st_size - _EDGE_BYTES))
        return hashlib.sha256(first + file.read(_EDGE_BYTES)).hexdigest()


def _full(path: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _remembered(path: Path, forgotten: list[tuple[Path, Exception]]) -> str:
    """The digest of all of *path*, from the last time where the file is as it was.

    Processes that ask for the same file wait for the first one, and are then told what it found. A file whose digest
    can't be kept goes into *forgotten*, with the reason.
    """
    real = path.resolve()
    if (identity := look_at_file(real)) is None:
        return _full(real)
    try:
        entry = _open_entry(real)
    except (OSError, RuntimeError) as error:  # without a home there is no directory for it
        forgotten.append((path, error))
        return _full(real)
    with os.fdopen(entry, "r+b", buffering=0) as file:
        known = _recall(file, identity)
        if known is not None:
            return known
        _log.info("reading all of %s (%s), to know it again", path, format_size(path.stat().st_size))
        digest = _full(real)
        if look_at_file(real) == identity and is_settled(identity):
            try:
                _note(file, json.dumps([identity, digest]).encode())
            except OSError as error:
                forgotten.append((path, error))
        return digest


def _open_entry(real: Path) -> int:
    """A locked descriptor of what is remembered of the file *real*."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    directory = Path(home).expanduser() / "kvtier" / "weights"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = directory / hashlib.sha256(os.fsencode(real)).hexdigest()[:40]
    if not place.exists():
        _forget_some(directory)
    entry = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(entry, place)
    except OSError:
        os.close(entry)
        raise
    return entry


def _lock(entry: int, place: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"another process has kept {place} for {_PATIENCE_S:g} s: it hangs, or left a child behind. End it"
                ) from None
        time.sleep(_POLL_S)


def _recall(entry: FileIO, identity: FileLook) -> str | None:
    """What was noted of the file, where that is still the same one; ``None`` also where the note was cut off."""
    try:
        noted, digest = json.loads(entry.read())
        os.utime(entry.fileno())
    except (OSError, ValueError, TypeError):
        return None
    return digest if noted == identity and isinstance(digest, str) else None


def _note(entry: FileIO, text: bytes) -> None:
    entry.truncate(0)
    entry.seek(0)
    entry.write(text)


def _forget_some(directory: Path) -> None:
    entries = [(item.stat().st_mtime_ns, item.path) for item in os.scandir(directory)]
    for _, path in sorted(entries)[: max(0, len(entries) - _MAX_REMEMBERED + 1)]:
        Path(path).unlink(missing_ok=True)


def look_at_file(path: Path) -> FileLook | None:
    """Which file is at *path* and when it changed, or ``None`` where its times don't tell.

    Two looks that are equal, the first of them ``is_settled``, mean that nothing was written in between. Cost: opening
    the file. Raises ``OSError`` when that fails.
    """
    with path.open("rb") as file:  # opened: a network's file system then asks its server
        found, on = os.fstat(file.fileno()), os.fstatvfs(file.fileno())
    if not _tells_changes(found.st_ctime_ns, is_read_only=bool(on.f_flag & os.ST_RDONLY)):
        return None
    return [str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def is_settled(look: FileLook) -> bool:
    """Whether the file's last change was so long ago that another one would get another time stamp."""
    changed_ns = look[-1]
    assert isinstance(changed_ns, int)
    return changed_ns < time.time_ns() - _SETTLED_NS


def _tells_changes(ctime_ns: int, *, is_read_only: bool) -> bool:
    """Whether a kernel set this time. In an image (squashfs, ISO 9660) it is what its maker wrote, in whole seconds.

    Reproducible ones have the same times throughout, so that two are told apart by nothing but what is in their files.
    """
    return not is_read_only or ctime_ns % 1_000_000_000 != 0
