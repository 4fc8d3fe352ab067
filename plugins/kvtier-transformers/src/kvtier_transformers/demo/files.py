"""What the demo does to the stored files between two processes: out of the page cache, or damaged on purpose.

Decides which places to damage; knows nothing of their format but that blocks make up most of what is written.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_SMALLEST_BLOCK_FILE = 4096
_DAMAGED_PLACES = 3
_NOT_FAR_ENOUGH = 1 / 7
"""Where a place would be at the edge between two blocks, it moves by this part of the distance to the next."""


def block_files(root: Path) -> list[Path]:
    """Files that hold blocks, oldest first: the text that all questions share was stored before the questions."""
    files = [
        path for path in root.rglob("*") if path.is_file() and path.stat().st_size >= _SMALLEST_BLOCK_FILE
    ]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def drop_page_cache(root: Path) -> None:
    """Write every file below *root* to the disk and ask the kernel to forget its pages, so that reads are reads."""
    for path in block_files(root):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def flip_bytes(root: Path, shared_bytes: int) -> list[Path]:
    """Flip one bit in up to three places among the oldest *shared_bytes* stored; return the files that hold them."""
    segments = [(path, *segment) for path in block_files(root) for segment in written_parts(path)]
    room = min(shared_bytes, sum(length for _, _, length in segments))
    damaged: list[Path] = []
    for number in range(1, _DAMAGED_PLACES + 1):
        left = int(room * (number + _NOT_FAR_ENOUGH) / (_DAMAGED_PLACES + 1))
        for path, start, length in segments:
            if left < length:
                _flip(path, start + left)
                damaged.append(path)
                break
            left -= length
    return list(dict.fromkeys(damaged))


def written_parts(path: Path) -> Iterator[tuple[int, int]]:
    """The parts of a file that were written, as (start, length): files may be longer than what is in them yet."""
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size
        end = 0
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing after this
                return
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            yield start, end - start


def _flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
