"""Run as a program: kills processes that are storing blocks on a disk tier, and looks at what they left.

``python killed_writers.py ROOT ROUNDS``: prints one JSON object. A writer has several threads that store rows again
and again under keys of its round; it is killed with SIGKILL at a random moment. A new instance then must serve complete
blocks alone, have no leftovers, and be able to store the killed keys.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierContext
from kvtier_disk import FilesTier
from kvtier_testing.rows import RowMaker, similar_keys

MAKER = RowMaker("killed", 250_000)
THREADS = 3


def open_tier(root: str) -> FilesTier:
    settings = FilesTier.Settings.model_validate({"type": "disk", "root": root})
    tier = FilesTier(settings, TierContext(name="disk", namespace="killed", row_bytes=MAKER.row_bytes))
    tier.open()
    return tier


def write_for_ever(root: str, rows: dict[OffloadKey, bytes], ready: int) -> None:
    tier = open_tier(root)

    def work(keys: list[OffloadKey]) -> None:
        while True:
            for key in keys:
                tier.store(key, memoryview(rows[key]))

    keys = list(rows)
    for number in range(THREADS):
        threading.Thread(target=work, args=(keys[number::THREADS],), daemon=True).start()
    os.write(ready, b"x")
    signal.pause()


def kill_one(root: str, rows: dict[OffloadKey, bytes], after_s: float) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        write_for_ever(root, rows, writing)
    os.close(writing)
    if os.read(reading, 1) != b"x":
        raise RuntimeError("the writer did not start")
    os.close(reading)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def look(root: str, rows: dict[OffloadKey, bytes], seen: Counter[str]) -> None:
    tmp = Path(root, "killed", "tmp")
    seen["leftovers"] += len(os.listdir(tmp))
    tier = open_tier(root)
    seen["leftovers after open"] += len(os.listdir(tmp))
    scanned = {block.key for block in tier.scan()}
    for key, row in rows.items():
        into = bytearray(len(row))
        found = tier.load(key, memoryview(into))
        seen["agree" if found == (key in scanned) == tier.contains([key])[0] else "disagree"] += 1
        if found:
            seen["exact" if into == row else "wrong bytes"] += 1
        else:
            seen["missing"] += 1
            tier.store(key, memoryview(row))
            seen["stored later" if tier.load(key, memoryview(into)) and into == row else "not storable"] += 1
    tier.close()


def main(root: str, rounds: int) -> None:
    rng = random.Random(0)
    seen: Counter[str] = Counter()
    for number in range(rounds):
        rows = {key: MAKER.make(key) for key in similar_keys(30, seed=number)}
        kill_one(root, rows, rng.uniform(0.0, 0.006))
        look(root, rows, seen)
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
