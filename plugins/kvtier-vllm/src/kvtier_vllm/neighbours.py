"""Which processes of this machine have a piece of shared memory mapped, as the kernel says.

vLLM tells a tier behind its own tiering how many workers there are, and not where they run. Only those that have its
region mapped here can fill their part of its rows. Decides nothing.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np


def count_neighbours(memory: memoryview) -> int:
    """How many other processes have the shared *memory* mapped; 0 where it is not shared.

    Processes of other users, and in other process namespaces, are not seen. A child that one of them forked has its
    mapping too, and is not counted. Cost: one file of /proc a process, 0.1 to 10 ms each.
    """
    address = int(np.asarray(memory).ctypes.data)
    file = next((file for begin, end, file in _mappings("self") if begin <= address < end), None)
    if file is None:
        return 0
    processes = {path.name for path in Path("/proc").iterdir() if path.name.isdigit()}
    others = processes - {str(os.getpid())}
    having = {pid for pid in others if any(file == found for _, _, found in _mappings(pid))}
    return sum(_parent(pid) not in having for pid in having)


def _mappings(pid: str) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """Begin and end of each mapping of a file, and the file by device and inode; none of a process that is gone."""
    with suppress(OSError):
        for line in Path("/proc", pid, "maps").read_text(errors="replace").splitlines():
            addresses, _, _, device, inode, *_ = line.split(maxsplit=5)
            if inode != "0":
                begin, _, end = addresses.partition("-")
                yield int(begin, 16), int(end, 16), (device, inode)


def _parent(pid: str) -> str | None:
    with suppress(OSError):
        for line in Path("/proc", pid, "status").read_text(errors="replace").splitlines():
            if line.startswith("PPid:"):
                return line.split()[1]
    return None
