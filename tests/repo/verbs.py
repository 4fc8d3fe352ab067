"""Runs pytest where libibverbs is found, without which Mooncake's client can't be imported, also where it speaks TCP.

Where the system lacks it, apt brings Debian's packages to a folder and they are unpacked there: nothing is installed,
and no rights are needed. ``python -m tests.repo.verbs FOLDER [PYTEST ARGUMENTS]``.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = "libibverbs.so.1"
PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


def is_there() -> bool:
    """Whether the system has it."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY)
        return True
    return False


def bring(place: Path) -> list[Path]:
    """The folders of the library and of what it needs, below *place*; empty where apt can't bring them."""
    if shutil.which("apt-get") and shutil.which("dpkg"):
        subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=place, check=False)
    for package in place.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, place], check=True)
    return sorted({file.parent for file in place.rglob("*.so.*")}) if list(place.rglob(LIBRARY)) else []


def main() -> None:
    """Replace this process with pytest."""
    place, *arguments = sys.argv[1:]
    environment = dict(os.environ)
    if not is_there():
        folders = bring(Path(place).resolve())
        if not folders:
            sys.exit(
                f"Mooncake's client needs {LIBRARY}, and apt can't bring it: apt-get update, or install {PACKAGES[0]}"
            )
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, folders))
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *arguments], environment)


if __name__ == "__main__":
    main()
