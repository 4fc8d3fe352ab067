"""Who else has a piece of shared memory mapped: what tells the bridge that all workers are on its host (V11)."""

import mmap
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from kvtier_vllm.neighbours import count_neighbours

MAP_AND_WAIT = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapping = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""
FORK_AND_WAIT = MAP_AND_WAIT.replace("print(", "import os\nif os.fork(): print(")


@contextmanager
def mapped(path: Path):
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    view = memoryview(mapping)
    try:
        yield view
    finally:
        view.release()
        mapping.close()


@contextmanager
def worker(path: Path, program: str = MAP_AND_WAIT):
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"mapped\n"
        yield
        process.stdin.close()
        process.stdout.read()  # ends with the last one that has it


def region(path: Path) -> Path:
    path.write_bytes(bytes(1 << 16))
    return path


def test_v11_each_process_that_has_it_mapped_counts_once_and_one_with_another_file_does_not(tmp_path):
    here, elsewhere = region(tmp_path / "here"), region(tmp_path / "elsewhere")
    with mapped(here) as view:
        assert count_neighbours(view) == 0
        with worker(here), worker(elsewhere):
            assert count_neighbours(view[4096:]) == 1
            with worker(here):
                assert count_neighbours(view) == 2
        assert count_neighbours(view) == 0


def test_v11_a_name_that_is_gone_does_not_matter_and_a_forked_child_is_no_second_worker(tmp_path):
    here = region(tmp_path / "here")
    with mapped(here) as view, worker(here, FORK_AND_WAIT):
        os.unlink(here)
        assert count_neighbours(view) == 1


def test_v11_memory_that_nobody_can_share_has_no_neighbours():
    assert count_neighbours(memoryview(bytearray(1 << 16))) == 0
