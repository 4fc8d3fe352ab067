"""Disk tiers, with and without the core around them, and what they leave in their files."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierContext
from kvtier_disk import FilesTier
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.rows import RowMaker, similar_keys

HERE = Path(__file__).parent
MAKER = RowMaker("ns", 5000)
ROW = MAKER.row_bytes
A, B, C, *_ = KEYS = similar_keys(50)


def rows(*keys: OffloadKey) -> dict[OffloadKey, bytes]:
    return {key: MAKER.make(key) for key in keys}


def drive(
    root: Path,
    *,
    capacity_blocks: int | None = None,
    namespace: str = "ns",
    wall: Callable[[], float] = time.time,
    **settings: object,
) -> TierDriver:
    return TierDriver(
        FilesTier,
        FilesTier.Settings.model_validate({"type": "disk", "root": root, "min_free": 0, **settings}),
        row_bytes=ROW,
        namespace=namespace,
        capacity_bytes=None if capacity_blocks is None else capacity_blocks * ROW,
        name="disk",
        wall=wall,
    )


def direct(root: Path) -> FilesTier:
    """The tier without the core around it."""
    settings = FilesTier.Settings.model_validate({"type": "disk", "root": root, "min_free": 0})
    return FilesTier(settings, TierContext(name="disk", namespace="ns", row_bytes=ROW))


def block_file(root: Path, key: OffloadKey) -> Path:
    return root / "ns" / key.hex()[:2] / f"{key.hex()}.kv"


def block_files(root: Path) -> list[Path]:
    return sorted((root / "ns").glob("??/*.kv"))


def leftovers(root: Path) -> list[Path]:
    return list((root / "ns" / "tmp").iterdir())


def run_program(name: str, *args: object, under: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program of this directory, with the programs *under* it that it needs."""
    return subprocess.run(
        [*under, sys.executable, "-W", "error", HERE / name, *map(str, args)],
        cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
