"""The pool's memory: how much this process may still take, and a file in no folder that holds it.

The limit is the machine's, or less where a control group says so. It is read before the memory is made: what does not
fit would fail later, by SIGBUS or the out-of-memory killer, in the middle of a copy. The file is a memfd, sealed
against resizing. Another process of the same user finds it in /proc, among the open files of a process that has it.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PRIVATE = 0o600
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""The process or its file has ended, or is another user's."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """``bytes`` can be taken before ``source`` (a file, for people) says stop."""

    bytes: int
    source: str


class _Names(NamedTuple):
    """What one version of control groups calls its files. Clean file pages are given back on demand."""

    limit: str
    usage: str
    reclaimable: tuple[str, ...]


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def find_memory_limit(proc: Path = _PROC, cgroup: Path = _CGROUP) -> MemoryLimit:
    """The tightest of the machine's available memory and the limits of this process's control groups.

    Cost: a few small reads. Raises ``OSError`` when there is no /proc/meminfo.
    """
    of_groups = (_group_limit(folder, names) for folder, names in _memory_groups(proc, cgroup))
    limits = [_machine_limit(proc), *(limit for limit in of_groups if limit is not None)]
    return min(limits, key=lambda item: item.bytes)


def _machine_limit(proc: Path) -> MemoryLimit:
    path = proc / "meminfo"
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return MemoryLimit(bytes=int(fields["MemAvailable"].split()[0]) * 1024, source=f"{path} (MemAvailable)")


def _memory_groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, _Names]]:
    """The control groups that bound this process's memory, each with all its parents."""
    path = proc / "self" / "cgroup"
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0":
            root, names = cgroup, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroup / "memory", _V1
        else:
            continue
        parts = Path(group.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth]), names


def _group_limit(folder: Path, names: _Names) -> MemoryLimit | None:
    """None where the group sets no limit or, inside a container, its folder is not visible."""
    try:
        limit = (folder / names.limit).read_text().strip()
        usage = int((folder / names.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    reclaimable = sum(int(stat.get(name, 0)) for name in names.reclaimable)
    left = int(limit) - usage + min(reclaimable, usage)
    return MemoryLimit(bytes=max(0, left), source=str(folder / names.limit))


def make_memory(name: str, total_bytes: int, header: bytes, note: bytes, what: str) -> int:
    """A descriptor of *total_bytes* of memory, zeros after *header*, and *note* behind them.

    Raises ``MemoryError``, which says *what* does not fit, before any memory is taken.
    """
    limit = find_memory_limit()
    if total_bytes > limit.bytes:
        raise MemoryError(
            f"{what} does not fit: {limit.source} leaves {format_size(limit.bytes)}. "
            "Set a smaller pool capacity or free memory."
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, _PRIVATE)  # a new memfd is open to everybody who may look into a process's descriptors
        os.ftruncate(fd, total_bytes + len(note))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        os.pwrite(fd, note, total_bytes)
        os.pwrite(fd, header, 0)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"the kernel refused {what}: {error}") from error
    return fd


def find_memory(name: str, is_wanted: Callable[[int], bool]) -> int | None:
    """A new descriptor of a memory of this *name* and user that *is_wanted*, whichever process has it open.

    Cost: a look at every open file of this user's processes, 2 us each. Raises ``OSError`` where this process may open
    no more files.
    """
    link = f"/memfd:{name} (deleted)"
    for path in _open_files():
        with suppress(*_GONE):
            if os.readlink(path) != link:  # noqa: PTH115 - a third of the time
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if _is_named(fd, link) and is_wanted(fd):
                return fd
            os.close(fd)
    return None


def _is_named(fd: int, link: str) -> bool:
    """Whether it is still that file, and this user's: the superuser may open another's."""
    is_same = os.readlink(f"{_PROC}/self/fd/{fd}") == link  # noqa: PTH115 - as above
    return is_same and os.fstat(fd).st_uid == os.geteuid()


def _open_files() -> Iterator[str]:
    """The path of every open file of every process that this one may look into."""
    for process in filter(str.isdigit, os.listdir(_PROC)):  # noqa: PTH208 - a fifth of the time, here and below
        folder = f"{_PROC}/{process}/fd"
        with suppress(*_GONE):
            yield from [f"{folder}/{number}" for number in os.listdir(folder)]  # noqa: PTH208


def format_size(count: float) -> str:
    """Bytes for a person: ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:  # noqa: PLR2004 - the step between the units
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
