"""What a power failure leaves of a directory: recorded writes as far as they were synced, and the rest by chance.

A writer runs with a small library before the C library, which records every call that changes a file of the tier, the
index's own among them. For each cut a moment is chosen; what was synced by then is there. Of the other writes each is
there, or is not, or is in part, sector by sector; of the other changes of names those up to some moment are there, as
a journalling file system keeps them in order. Decides what is left; what has to be true of it is ``look``'s.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from kvtier_core.errors import ConfigError, KvtierError
from kvtier_testing.crash_processes import look
from kvtier_testing.subjects import Subject

_RECORDER = Path(__file__).with_name("power_loss_recorder.c")
_HEAD = struct.Struct("<cIIQQ")
_SECTOR = 512
_CUTS_A_RECORDING = 10
_WRITER_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One recorded call: ``kind`` is W(rite), T(runcate), C(reate), U(nlink), R(ename) or S(ync)."""

    kind: str
    path: str
    target: str = ""
    offset: int = 0
    length: int = 0
    data: bytes = b""


@dataclass(eq=False)
class _File:
    """A file's bytes as they are on the disk, and the calls that no sync has covered yet."""

    content: bytearray = field(default_factory=bytearray)
    pending: list[Call] = field(default_factory=list)


def cut_power(subject: Subject, directory: Path, cuts: int, rng: Random) -> Counter[str]:
    """Cut the power so often, and look at what is left; what was found, counted. Raises ``ConfigError``."""
    library = _compile(directory)
    root = directory / "powered" / "root"
    recorded = subject.at(root)
    seen: Counter[str] = Counter()
    for number in range(-(-cuts // _CUTS_A_RECORDING)):
        before = read_tree(root)
        calls = list(_record(recorded, root, number, library, directory / "calls"))
        for _ in range(min(_CUTS_A_RECORDING, cuts - number * _CUTS_A_RECORDING)):
            left = directory / "left" / "root"
            write_tree(left, what_is_left(before, root, calls[: rng.randrange(len(calls) + 1)], rng))
            cut = subject.at(left)
            seen += look(cut, number, set(), torn_is_wrong=False)
            shutil.rmtree(left.parent)
    return seen


def what_is_left(
    before: dict[str, bytes], root: Path, calls: Sequence[Call], rng: Random
) -> dict[str, bytes]:
    """The files, by path below the root, after a power failure that followed *calls*."""
    disk = _Disk(before)
    for call in calls:
        name, target = (os.path.relpath(path, root) if path else "" for path in (call.path, call.target))
        disk.take(replace(call, path=name, target=target))
    return disk.lose_power(rng)


class _Disk:
    """Files as a process sees them, as they certainly are on the disk, and the changes in between."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._on_disk = {name: _File(bytearray(content)) for name, content in files.items()}
        self._seen = dict(self._on_disk)
        self._changes: list[tuple[Call, _File]] = []  # of names, in order
        self._safe = 0  # so many of them are certainly on the disk

    def take(self, call: Call) -> None:
        """The process made this call."""
        if call.kind == "C":
            self._seen[call.path] = _File()
        file = self._seen.get(call.path)
        if file is None:
            return  # written after it was unlinked
        if call.kind == "S":
            self._safe = len(self._changes)
            _settle(file)
        elif call.kind in "CRU":
            self._changes.append((call, file))
            _rename(self._seen, call, file)
        else:
            file.pending.append(call)

    def lose_power(self, rng: Random) -> dict[str, bytes]:
        """What is there afterwards."""
        for call, file in self._changes[: rng.randint(self._safe, len(self._changes))]:
            _rename(self._on_disk, call, file)
        return {name: _by_chance(file, rng) for name, file in self._on_disk.items()}


def _rename(names: dict[str, _File], call: Call, file: _File) -> None:
    """Apply a change of names."""
    if call.kind == "C":
        names[call.path] = file
        return
    names.pop(call.path, None)
    if call.kind == "R":
        names[call.target] = file


def _settle(file: _File) -> None:
    for call in file.pending:
        _apply(file.content, call)
    file.pending.clear()


def _by_chance(file: _File, rng: Random) -> bytes:
    content = bytearray(file.content)
    dropped = rng.choice((0.0, 0.2, 0.5, 1.0))
    for call in file.pending:
        if rng.random() < dropped:
            continue
        if call.kind == "W" and rng.random() < dropped:
            for part in _sectors(call):
                if rng.random() < 0.5:
                    _apply(content, part)
        else:
            _apply(content, call)
    return bytes(content)


def _sectors(call: Call) -> Iterator[Call]:
    at = 0
    while at < call.length:
        size = min(_SECTOR - (call.offset + at) % _SECTOR, call.length - at)
        yield replace(call, offset=call.offset + at, length=size, data=call.data[at : at + size])
        at += size


def _apply(content: bytearray, call: Call) -> None:
    if call.kind == "T":
        del content[call.length :]
        content.extend(bytes(call.length - len(content)))
        return
    content.extend(bytes(max(0, call.offset - len(content))))
    content[call.offset : call.offset + call.length] = call.data


# Recording.


def _compile(directory: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise ConfigError("--power-cuts needs a C compiler (cc) on the PATH")
    library = directory / "recorder.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_RECORDER), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"--power-cuts: {compiler} can't compile {_RECORDER.name}: {done.stderr.strip()}")
    return library


def _record(subject: Subject, root: Path, number: int, library: Path, log: Path) -> Iterator[Call]:
    """Let a writer do its work in a process of its own; the calls it made."""
    log.unlink(missing_ok=True)
    order = json.dumps({"settings": subject.settings.model_dump(mode="json"), "number": number})
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "KVT_RECORD_ROOT": str(root),
        "KVT_RECORD_LOG": str(log),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_testing.crash_writer", order],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_WRITER_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise KvtierError(f"the recorded writer failed: {done.stderr.strip()[-2000:]}")
    yield from _parse(log.read_bytes())


def _parse(recorded: bytes) -> Iterator[Call]:
    at = 0
    while at < len(recorded):
        kind, first, second, offset, length = _HEAD.unpack_from(recorded, at)
        at += _HEAD.size
        path, target = recorded[at : at + first].decode(), recorded[at + first : at + first + second].decode()
        at += first + second
        size = length if kind == b"W" else 0
        yield Call(
            kind=kind.decode(),
            path=path,
            target=target,
            offset=offset,
            length=length,
            data=recorded[at : at + size],
        )
        at += size


# Directories.


def read_tree(root: Path) -> dict[str, bytes]:
    """Every regular file below *root*, by its path below it."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def write_tree(root: Path, files: dict[str, bytes]) -> None:
    """Make *root* hold these files."""
    root.mkdir(parents=True)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
