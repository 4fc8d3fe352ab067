"""One process of an engine that shares a pool, without torch, to be killed and forked at will.

Run as ``pool_member.py NAME MEMBER NUM_WORKERS KIND``, KIND being ``anonymous`` or ``named``. Tells the inode of its
pool, or the error it got; then answers each command, a line each, with a line:

- ``wait``: ``all`` when all have come
- ``missing``: the members that are missing
- ``begin JOB``: announces a store and stays in the middle of it
- ``fork``: the number of a child that does nothing
- ``fork-close``: ``closed`` when a child has closed the pool, and ended
- ``fork-use``: what a child wrote to a row, and what it was told when it asked for missing members
"""

import os
import signal
import sys

from kvtier_core.transfer import Direction, Pool, PoolGeometry

TIMEOUT_S = 60.0


def _fork() -> int:
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    return child


def _fork_and_close(pool: Pool) -> str:
    child = os.fork()
    if child == 0:
        os._exit(0 if pool.close() else 1)
    _, status = os.waitpid(child, 0)
    return "closed" if status == 0 else "not closed"


def _fork_and_use(pool: Pool) -> list[object]:
    child = os.fork()
    if child == 0:
        try:
            pool.missing_members()
        except ValueError as error:
            text = str(error).encode()
            pool.row(1)[: 1 + len(text)] = b"\7" + text
        os._exit(0)
    os.waitpid(child, 0)
    return [pool.row(1)[0], bytes(pool.row(1)[1:]).rstrip(b"\0").decode()]


def _answer(pool: Pool, member: int, command: str, *arguments: str) -> object:
    match command:
        case "wait":
            pool.wait_for_members(TIMEOUT_S)
            return "all"
        case "missing":
            return pool.missing_members()
        case "begin":
            return pool.control.begin(member, Direction.STORE, int(arguments[0]), pool.control.epoch)
        case "fork":
            return _fork()
        case "fork-use":
            return _fork_and_use(pool)
        case _:
            return _fork_and_close(pool)


def main(name: str, member: int, num_workers: int, kind: str) -> None:
    geometry = PoolGeometry(num_rows=4, row_bytes=4096, num_workers=num_workers)
    try:
        pool = Pool.open(geometry, name, member, named=kind == "named")
    except OSError as error:
        print(type(error).__name__, error, flush=True)
        return
    print(os.fstat(pool.fd).st_ino, flush=True)
    for line in sys.stdin:
        print(_answer(pool, member, *line.split()), flush=True)
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
