"""Run as a program that may mount: a disk tier on a file system that is full, then read-only, then neither.

``python full_disk.py DIRECTORY``: mounts a small file system there, which goes when the program's mounts go. Prints a
line for each of the three once it was as it should be.
"""

import subprocess
import sys
from pathlib import Path

from kvtier_core.errors import TierOpenError
from kvtier_testing.tiers import assert_contents
from tests.tiers.disk import KEYS, ROW, block_files, drive, leftovers, rows


def mount(root: Path, options: str, *kind: str) -> None:
    subprocess.run(["mount", *kind, "-o", options, "none", root], check=True)


def fill(root: Path) -> None:
    with (root / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def expect(fact: object, what: object) -> None:
    if not fact:
        raise RuntimeError(what)


def serve(root: Path, error: str | None) -> None:
    """Open the tier, load what it holds, and see a store fail with *error*; declined where that is ``None``."""
    held = [key for key in KEYS if root.joinpath("ns", key.hex()[:2], f"{key.hex()}.kv").exists()]
    others = [key for key in KEYS if key not in held]
    with drive(root) as tier:
        assert_contents(tier, rows(*held), absent=others)
        result = tier.store(rows(others[0]))
        expect((result.missing if error is None else result.failed) == (others[0],), result)
        expect(str(error) in str(result.error), result)
        assert_contents(tier, rows(*held), absent=others)


def main(root: Path) -> None:
    mount(root, f"size={16 * ROW},mode=755", "-t", "tmpfs")
    with drive(root) as tier:
        result = tier.store(rows(*KEYS))
        expect(0 < len(result.failed) < len(KEYS), result)
    fill(root)
    serve(root, "No space left on device")
    (root / "ns" / "namespace.json").unlink()
    fill(root)
    serve(root, "No space left on device")
    sys.stdout.write("full: served\n")

    mount(root, "remount,ro")
    serve(root, None)
    try:
        drive(root, namespace="other")
    except TierOpenError as error:
        expect("Read-only file system; set root" in str(error), error)
    else:
        raise RuntimeError("a namespace that is not there was opened on a read-only root")
    sys.stdout.write("read-only: served\n")

    mount(root, "remount,rw")
    (root / "ballast").unlink()
    with drive(root, capacity_blocks=8) as tier:
        expect(tier.store(rows(*KEYS[-8:])).error is None, "not stored")
        assert_contents(tier, rows(*KEYS[-8:]), absent=KEYS[:-8])
        expect(len(block_files(root)) == 8, block_files(root))
        expect(leftovers(root) == [], leftovers(root))
    sys.stdout.write("writable: stored\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
