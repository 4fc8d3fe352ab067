"""Run as a program: many processes store the same keys on one root, on a file system whose locks do nothing.

``python shared_writers.py ROOT PROCESSES KEYS``: exit status 0 when every store of every process succeeded.
"""

import fcntl
import os
import random
import sys

from kvtier_core.values import TierContext
from kvtier_disk import FilesTier
from kvtier_testing.rows import RowMaker, similar_keys

MAKER = RowMaker("shared", 100_000)


def work(root: str, count: int, number: int) -> None:
    settings = FilesTier.Settings.model_validate({"type": "disk", "root": root})
    tier = FilesTier(settings, TierContext(name="disk", namespace="shared", row_bytes=MAKER.row_bytes))
    tier.open()
    keys = similar_keys(count)
    random.Random(number).shuffle(keys)
    for key in keys:
        tier.store(key, memoryview(MAKER.make(key)))


def main(root: str, processes: int, count: int) -> int:
    fcntl.flock = lambda *_args: None  # what some network file systems do
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            try:
                work(root, count, number)
            except BaseException as error:  # noqa: BLE001 - the child must not return into the parent's code
                os.write(2, f"{error!r}\n".encode())
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
