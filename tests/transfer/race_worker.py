"""A worker process for the race test: carries out the stores it reads from its standard input.

Run as ``race_worker.py POOL_PATH MODE``. Each job is a line: job id, epoch, row, stamp, milliseconds to pause
in the middle. MODE "correct" announces a job and then checks the epoch; "check_first" is the mistake the
control page's docstring warns of. At the end of the input it prints how many jobs it finished and how many it
dropped.
"""

import sys
import time

from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.pool import Pool

_PIECE = 16384


def _begin_check_first(pool: Pool, job_id: int, epoch: int) -> bool:
    if pool.control.epoch != epoch:
        return pool.control.begin(0, Direction.STORE, job_id, epoch)
    time.sleep(0.001)  # the window of the mistake, held open
    return pool.control.begin(0, Direction.STORE, job_id, pool.control.epoch)


def main(path: str, mode: str) -> None:
    finished = dropped = 0
    with Pool.attach(path) as pool:
        for line in sys.stdin:
            job_id, epoch, row, stamp, pause_ms = map(int, line.split())
            if mode == "check_first":
                begun = _begin_check_first(pool, job_id, epoch)
            else:
                begun = pool.control.begin(0, Direction.STORE, job_id, epoch)
            if not begun:
                dropped += 1
                continue
            # In pieces, so that a reuse in the middle of a store shows.
            piece = bytes([stamp]) * _PIECE
            target = pool.row(row)
            for begin in range(0, len(target), _PIECE):
                if begin == len(target) // 2 and pause_ms:
                    time.sleep(pause_ms / 1000)  # a slow copy, for the scheduler to cut into
                target[begin : begin + _PIECE] = piece
            del target
            pool.control.finish(0, Direction.STORE, job_id, ok=True)
            finished += 1
    print(finished, dropped)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
