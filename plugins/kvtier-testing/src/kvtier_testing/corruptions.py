"""Damages one file below a directory, as disks, people and programs do (rsync, a restored backup, a failing cable).

Decides what is damaged and how, by a random generator that its caller seeds. Knows no tier: a file's *kind* is its name
with every number in it made one. Writes in place, so that a process which has the file open meets the damage too.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

_NUMBER = re.compile(r"(?<![a-z])[0-9a-f]*[0-9][0-9a-f]*(?![a-z])")
_NOBODYS = ".bak"
"""How files end that a damage has left, and nobody knows."""
_RANGE_BYTES = 4096
_HEAD_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """What was done to which file."""

    how: str
    kind: str
    path: str
    """Below the directory."""
    where: str

    def __str__(self) -> str:
        return f"{self.how} {self.path} {self.where}".rstrip()


@dataclass(frozen=True, kw_only=True)
class _Case:
    path: Path
    others: list[Path]
    old: bytes | None
    """What the file held some time ago."""
    rng: Random


def kind_of(path: str) -> str:
    """A file's path with every number in it made one, and a directory without any left out.

    ``"ns/000000001a.ext"`` is ``"#.ext"``, ``".kvtier/index-000001.db"`` is ``".kvtier/index-#.db"``.
    """
    *folders, name = path.split("/")
    kept = [folder for folder in folders if folder.startswith(".") or folder in ("alive", "tmp")]
    return "/".join([*kept, _NUMBER.sub("#", name)])


def files_below(root: Path) -> list[Path]:
    """Every regular file, sorted."""
    found = []
    for folder, _, names in os.walk(root):
        found += [path for name in names if (path := Path(folder, name)).is_file() and not path.is_symlink()]
    return sorted(found)


def contents_of(root: Path) -> dict[str, bytes]:
    """Every file's bytes, by its path below *root*."""
    found = {}
    for path in files_below(root):
        try:
            found[str(path.relative_to(root))] = path.read_bytes()
        except FileNotFoundError:
            continue
    return found


def corrupt(root: Path, old: dict[str, bytes], rng: Random) -> Corruption | None:
    """Damage one file below *root*; *old* is what files held some time ago. ``None`` where there is no file."""
    by_kind: dict[str, list[Path]] = {}
    for path in files_below(root):
        if not path.name.endswith(_NOBODYS):
            by_kind.setdefault(kind_of(str(path.relative_to(root))), []).append(path)
    if not by_kind:
        return None
    kind = rng.choice(sorted(by_kind))
    path = rng.choice(by_kind[kind])
    name = str(path.relative_to(root))
    case = _Case(path=path, others=[one for one in by_kind[kind] if one != path], old=old.get(name), rng=rng)
    how = rng.choice(sorted(WAYS))
    return Corruption(how=how, kind=kind, path=name, where=WAYS[how](case))


# The ways. Each says where.


def _position(case: _Case, size: int) -> int:
    """Somewhere, but more often where there is something."""
    at = case.rng.randrange(size)
    choice = case.rng.random()
    if choice < 0.3:
        return at % _HEAD_BYTES
    if choice < 0.8:
        with case.path.open("rb") as file:
            content = file.read()
        written = len(content.rstrip(b"\0"))
        return case.rng.randrange(written) if written else at
    return at


def _write(path: Path, at: int, content: bytes) -> str:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(content)
    return f"at {at}, {len(content)} bytes"


def _size(path: Path) -> int:
    return path.stat().st_size


def _flip(case: _Case) -> str:
    size = _size(case.path)
    if not size:
        return _append(case)
    at = _position(case, size)
    with case.path.open("rb") as file:
        file.seek(at)
        (byte,) = file.read(1)
    return _write(case.path, at, bytes([byte ^ 1 << case.rng.randrange(8)]))


def _overwrite(case: _Case, make: Callable[[int], bytes]) -> str:
    size = _size(case.path)
    if not size:
        return _append(case)
    at = _position(case, size)
    return _write(case.path, at, make(min(size - at, case.rng.randint(1, _RANGE_BYTES))))


def _zero(case: _Case) -> str:
    return _overwrite(case, bytes)


def _random(case: _Case) -> str:
    return _overwrite(case, case.rng.randbytes)


def _cut(case: _Case) -> str:
    size = case.rng.choice((0, case.rng.randrange(_size(case.path) + 1)))
    os.truncate(case.path, size)
    return f"to {size} bytes"


def _append(case: _Case) -> str:
    content = case.rng.randbytes(case.rng.choice((1, case.rng.randint(1, _RANGE_BYTES))))
    return _write(case.path, _size(case.path), content)


def _swap(case: _Case) -> str:
    """Two pages of the file change places, or it and another of its kind."""
    if case.others and case.rng.random() < 0.5:
        other = case.rng.choice(case.others)
        aside = case.path.with_name(f"{case.path.name}.aside")
        case.path.rename(aside)
        other.rename(case.path)
        aside.rename(other)
        return f"with {other.name}"
    size = _size(case.path)
    if size < 2:
        return _append(case)
    length = min(_RANGE_BYTES, size // 2)
    first, second = (case.rng.randrange(size // length) * length for _ in range(2))
    with case.path.open("rb") as file:
        content = file.read()
    _write(case.path, first, content[second : second + length])
    _write(case.path, second, content[first : first + length])
    return f"{length} bytes at {first} and {second}"


def _stale(case: _Case) -> str:
    """The file is what it was before: written over in place, or another file under its name."""
    content = case.old
    if content is None:
        return _zero(case)
    if case.rng.random() < 0.5:
        with case.path.open("r+b", buffering=0) as file:
            file.truncate(0)
            file.write(content)
        return "in place"
    draft = case.path.with_name(f"{case.path.name}.restored")
    draft.write_bytes(content)
    shutil.copymode(case.path, draft)
    draft.rename(case.path)
    return "as another file"


def _delete(case: _Case) -> str:
    case.path.unlink()
    return ""


def _neighbour(case: _Case) -> Path:
    """Another name of the file's kind where it has a number, else one that nobody knows."""
    numbers = list(_NUMBER.finditer(case.path.name))
    if not numbers:
        return case.path.with_name(f"{case.path.name}{_NOBODYS}")
    found = case.rng.choice(numbers)
    at = case.rng.randrange(found.start(), found.end())
    digit = case.rng.choice("0123456789")
    return case.path.with_name(f"{case.path.name[:at]}{digit}{case.path.name[at + 1 :]}")


def _rename(case: _Case) -> str:
    target = _neighbour(case)
    case.path.rename(target)
    return f"to {target.name}"


def _duplicate(case: _Case) -> str:
    target = _neighbour(case)
    if target != case.path:
        shutil.copy(case.path, target)
    return f"as {target.name}"


WAYS: dict[str, Callable[[_Case], str]] = {
    "flip": _flip,
    "zero": _zero,
    "random": _random,
    "cut": _cut,
    "append": _append,
    "swap": _swap,
    "stale copy": _stale,
    "delete": _delete,
    "rename": _rename,
    "duplicate": _duplicate,
}
"""How files are damaged."""
