"""Run as a program: one of several engines on one bucket, which store and load the same blocks for a while.

``python -m tests.tiers.object_engines PORT URL SEED SECONDS`` says ``at work`` when it has served, and when the time is
over how many blocks were loaded, missing, failed and wrong. A line on its input makes it store ``TOGETHER``. A second
line names blocks: it waits until it knows these, loads them, and says how many were right. It says all as JSON.
"""

import json
import random
import sys
import time
from collections import Counter

from kvtier_core.errors import TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_fsspec.object_tier import ObjectTier
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.rows import RowMaker, similar_keys
from tests.tiers.s3_server import options

MAKER = RowMaker("shared", 60_000)
KEYS = similar_keys(1500)
TOGETHER = similar_keys(30, seed=9)
LONGEST = 40
"""Blocks of one prompt."""
CAPACITY = 600 * MAKER.row_bytes


def drive(port: int, url: str) -> TierDriver:
    """An engine, open as soon as the server serves."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _drive(port, url)
        except TierOpenError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)


def _drive(port: int, url: str) -> TierDriver:
    settings = {
        "type": "fsspec",
        "url": url,
        "storage_options": options(port),
        "limits": {"load_timeout": 10},
    }
    return TierDriver(
        ObjectTier,
        ObjectTier.Settings.model_validate(settings),
        row_bytes=MAKER.row_bytes,
        namespace="shared",
        capacity_bytes=CAPACITY,
    )


def serve(tier: TierDriver, rng: random.Random, counts: Counter[str]) -> None:
    """One prompt: load what is there, store the rest."""
    begin = rng.randrange(len(KEYS) - LONGEST)
    keys = KEYS[begin : begin + rng.randint(1, LONGEST)]
    there = [*tier.lookup(keys), False].index(False)
    if there:
        loaded = tier.load(keys[:there])
        counts["missing"] += len(loaded.result.missing)
        counts["failed"] += len(loaded.result.failed)
        for key, row in loaded.rows.items():
            counts["loaded" if row == MAKER.make(key) else "wrong"] += 1
    if there < len(keys):
        stored = tier.store({key: MAKER.make(key) for key in keys[there:]})
        counts["not stored" if stored.error else "stored"] += len(keys) - there


def load_all(tier: TierDriver, keys: list[OffloadKey]) -> dict[OffloadKey, bytes]:
    """The rows that could be loaded; in pieces, since a driver has 64 rows."""
    rows: dict[OffloadKey, bytes] = {}
    for begin in range(0, len(keys), LONGEST):
        rows |= tier.load(keys[begin : begin + LONGEST]).rows
    return rows


def look_again(tier: TierDriver, expected: list[OffloadKey]) -> dict[str, float]:
    """Load the *expected* blocks as soon as the tier knows them; again where a server that was killed lost some."""
    begin = time.monotonic()
    rows: dict[OffloadKey, bytes] = {}
    while len(rows) < len(expected) and time.monotonic() < begin + PATIENCE_S:
        if all(tier.lookup(expected)):
            rows = load_all(tier, expected)
        else:
            time.sleep(0.02)
    right = [row == MAKER.make(key) for key, row in rows.items()]
    return {"seconds": time.monotonic() - begin, "right": right.count(True), "wrong": right.count(False)}


def main(port: int, url: str, seed: int, seconds: float) -> None:
    """Serve until the time is over, then do as the lines on the input say."""
    rng, counts, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    is_at_work = False
    with drive(port, url) as tier:
        while time.monotonic() < end or not counts["loaded"]:
            serve(tier, rng, counts)
            if not is_at_work:
                is_at_work = True
                print(json.dumps("at work"), flush=True)
        print(json.dumps(counts), flush=True)
        rows = {key: MAKER.make(key) for key in TOGETHER}
        sys.stdin.readline()
        print(json.dumps(tier.store(rows).error), flush=True)
        expected = [OffloadKey(bytes.fromhex(key)) for key in json.loads(sys.stdin.readline())]
        print(json.dumps(look_again(tier, expected)), flush=True)
        sys.stdin.readline()  # stay until all have looked


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
