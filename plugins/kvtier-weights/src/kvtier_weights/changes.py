"""Whether a model's files are those that a process has loaded, by the times of their last changes (C02)."""

import os
import time
from collections.abc import Sequence
from pathlib import Path


def process_began_ns() -> int:
    """When this process began, as a file's times say it. Reads a file of /proc."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # since the machine started
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns


def changed_since(since_ns: int, path: Path, files: Sequence[Path]) -> Path | None:
    """What of the *files* below *path*, of their directories and of the links to them is newer, if anything."""
    places = [place for place in (path.absolute(), *path.absolute().parents) if place.is_symlink()]
    places += [*{file.parent for file in files}, *files] if path.is_dir() else files
    newest = ((place, max(place.stat().st_ctime_ns, place.lstat().st_ctime_ns)) for place in places)
    return next((place for place, changed_ns in newest if changed_ns >= since_ns), None)
