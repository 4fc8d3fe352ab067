"""Disk tiers with extents, alone, with the core around them, and in processes of their own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierContext
from kvtier_disk import DiskSettings, DiskTier
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.rows import RowMaker, similar_keys

HERE = Path(__file__).parent
MAKER = RowMaker("ns", 64_000)
ROW = MAKER.row_bytes
A, B, C, *_ = KEYS = similar_keys(400)
MIB = 1 << 20


def rows(*keys: OffloadKey, namespace: str = "ns") -> dict[OffloadKey, bytes]:
    maker = MAKER if namespace == "ns" else RowMaker(namespace, MAKER.payload_bytes)
    return {key: maker.make(key) for key in keys}


def settings(root: Path, **changes: object) -> DiskSettings:
    values = {"type": "disk", "root": root, "min_free": 0, "refresh": "0.05s", **changes}
    return DiskTier.Settings.model_validate(values)


def drive(
    root: Path,
    *,
    capacity: int | None = None,
    namespace: str = "ns",
    row_bytes: int = ROW,
    name: str = "disk",
    **changes: object,
) -> TierDriver:
    chosen = settings(root, **changes)
    return TierDriver(
        DiskTier.for_settings(chosen),
        chosen,
        row_bytes=row_bytes,
        namespace=namespace,
        capacity_bytes=capacity,
        name=name,
    )


def direct(
    root: Path,
    *,
    capacity: int | None = None,
    namespace: str = "ns",
    row_bytes: int = ROW,
    **changes: object,
) -> DiskTier:
    """The tier without the core around it, open; ``follow`` is the test's to call."""
    context = TierContext(name="disk", namespace=namespace, row_bytes=row_bytes, capacity_bytes=capacity)
    tier = DiskTier(settings(root, **changes), context)
    tier.open()
    tier.follow()
    return tier


def store(tier: DiskTier, *keys: OffloadKey, namespace: str = "ns") -> list[bool | Exception]:
    content = rows(*keys, namespace=namespace)
    return list(tier.store_many(list(keys), [memoryview(row) for row in content.values()]))


def load(tier: DiskTier, *keys: OffloadKey) -> dict[OffloadKey, bytes]:
    """What the tier gives for these keys; raises what it meets."""
    buffers = [bytearray(ROW) for _ in keys]
    outcomes = tier.load_many(list(keys), [memoryview(buffer) for buffer in buffers])
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return {key: bytes(row) for key, row, there in zip(keys, buffers, outcomes, strict=True) if there}


def extent_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/*.ext"))


def index_file(root: Path) -> Path:
    (file,) = (root / ".kvtier").glob("index-??????.db")
    return file


def used_bytes(root: Path) -> int:
    """What the root takes on the disk, at this moment."""
    total = 0
    for path in [root, *root.rglob("*")]:
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def wait_until(is_so, what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up, f"not after {PATIENCE_S} s: {what}"
        time.sleep(0.01)


def program(text: str, *arguments: object) -> "subprocess.Popen[str]":
    """Run Python text in a process of its own, with this module as ``t``; it may print lines."""
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            f"import tests.tiers.extents as t\n{text}",
            *map(str, arguments),
        ],
        cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome_of(process: "subprocess.Popen[str]") -> dict[str, int]:
    """The JSON object that a program printed last."""
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, err
    found: dict[str, int] = json.loads(out.splitlines()[-1])
    return found
