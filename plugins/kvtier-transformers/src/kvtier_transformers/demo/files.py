"""What the demo does to the stored files between two processes: out of the page cache, or damaged on purpose.

Decides which files to damage; knows nothing of their format but that a block's bytes make up most of a file.
"""

import os
from pathlib import Path

_SMALLEST_BLOCK_FILE = 4096
_DAMAGED_FILES = 3


def _block_files(root: Path) -> list[Path]:
    """Files that hold blocks, oldest first: the text that all questions share was stored before the questions."""
    files = [
        path for path in root.rglob("*") if path.is_file() and path.stat().st_size >= _SMALLEST_BLOCK_FILE
    ]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name))


def drop_page_cache(root: Path) -> None:
    """Write every file below *root* to the disk and ask the kernel to forget its pages, so that reads are reads."""
    for path in _block_files(root):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def flip_bytes(root: Path, shared_blocks: int) -> list[Path]:
    """Flip one bit in up to three files among the oldest *shared_blocks*; return those files."""
    files = _block_files(root)[:shared_blocks]
    step = max(1, len(files) // (_DAMAGED_FILES + 1))
    damaged = files[step::step][:_DAMAGED_FILES] or files[:1]
    for path in damaged:
        with path.open("r+b") as file:
            # a third into the file lies in the block's own bytes, not in what follows them
            place = path.stat().st_size // 3
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
    return damaged
