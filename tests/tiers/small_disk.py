"""Programs on a small file system of their own, which goes when they end."""

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_testing.driving import PATIENCE_S
from tests.tiers.extents import HERE

KINDS = ["tmpfs", "ext4 in blocks of 1 KiB", "ext4 in blocks of 4 KiB"]
_MIB = 96


def mount(kind: str, place: Path) -> None:
    """Mount a file system of 96 MiB below *place*, at ``mnt``."""
    mnt = place / "mnt"
    mnt.mkdir(exist_ok=True)
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_MIB}M,mode=755", "none", mnt], check=True)
        return
    image = place / "image"
    with image.open("wb") as file:
        file.truncate(_MIB << 20)
    block = "1024" if "1 KiB" in kind else "4096"
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-b", block, image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mnt], check=True)


def fill(mnt: Path, left_kib: int = 0) -> None:
    """Take all the room, then give some back."""
    with (mnt / "ballast").open("ab", buffering=0) as file:
        for size in (65536, 4096, 1024):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
        file.truncate(max(0, file.tell() - (left_kib << 10)))


def child(work: Callable[[], int]) -> int:
    """The number of a process that ends with what *work* returns."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = work()
        except BaseException:  # noqa: BLE001 - nothing of the parent's may run here
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def child_ended(work: Callable[[], int]) -> int:
    """What *work* returns as an exit status, in a process of its own; -N where signal N ended that."""
    return os.waitstatus_to_exitcode(os.waitpid(child(work), 0)[1])


def run_on(kind: str, place: Path, text: str) -> None:
    """Run Python *text* with ``t``, ``disk``, ``mnt`` on a file system of *kind*; skips where none can be mounted."""
    head = (
        "import pathlib, sys\nimport tests.tiers.extents as t\nfrom tests.tiers import small_disk as disk\n"
        "kind, place = sys.argv[1], pathlib.Path(sys.argv[2])\n"
        "try:\n    disk.mount(kind, place)\nexcept Exception as error:\n    sys.exit(f'not mounted: {error}')\n"
        "mnt = place / 'mnt'\n"
    )
    own_mounts = ["unshare", "--mount", *(["--map-root-user"] if kind == "tmpfs" else [])]
    try:
        done = subprocess.run(
            [*own_mounts, sys.executable, "-c", head + text, kind, place],
            cwd=HERE.parent.parent,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
    except FileNotFoundError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    if done.stderr.startswith("unshare:") or "not mounted:" in done.stderr:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
