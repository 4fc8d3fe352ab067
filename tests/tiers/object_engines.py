"""Run as a program: one of several engines on one bucket, which store and load the same blocks for a while.

``python -m tests.tiers.object_engines PORT URL SEED SECONDS`` says ``at work`` when it has stored, and at the end
how many blocks were loaded, missing, failed and wrong, as JSON.
"""

import json
import random
import sys
import time
from collections import Counter

from kvtier_fsspec.object_tier import ObjectTier
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import RowMaker, similar_keys
from tests.tiers.s3_server import options

MAKER = RowMaker("shared", 60_000)
KEYS = similar_keys(1500)
LONGEST = 40
"""Blocks of one prompt."""
CAPACITY = 600 * MAKER.row_bytes


def drive(port: int, url: str) -> TierDriver:
    """An engine, open."""
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


def main(port: int, url: str, seed: int, seconds: float) -> None:
    """Serve until the time is over."""
    rng, counts, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    is_at_work = False
    with drive(port, url) as tier:
        while time.monotonic() < end or not counts["loaded"]:
            serve(tier, rng, counts)
            if counts["stored"] and not is_at_work:
                is_at_work = True
                print("at work", flush=True)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
