"""One process of an engine that shares a pool, without torch, to be killed and forked at will.

Run as ``pool_member.py NAME MEMBER NUM_WORKERS``. Tells the inode of its
pool, or the error it got; then answers each command, a line each, with a line:

- ``wait``: ``all`` when all have come
- ``missing``: the members that are missing
- ``begin JOB``: announces a store and stays in the middle of it
- ``fork``: the number of a child that does nothing
- ``fork-close``: ``closed`` when a child has closed the pool, and ended
- ``fork-drop``: ``dropped`` when a child has dropped the pool without closing it, and ended
- ``fork-use``: what a child wrote to a row, and what it was told when it asked for missing members
"""

import os
import signal
import sys
from collections.abc import Callable

from kvtier_core.transfer import Direction, Pool, PoolGeometry

TIMEOUT_S = 60.0


def _fork() -> int:
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(begins)  # by now it has closed its copies of what shows that its parent lives
        while True:
            signal.pause()
    os.close(begins)
    os.read(begun, 1)  # until the child has closed its end
    os.close(begun)
    return child


def _fork_and_close(pools: list[Pool]) -> str:
    child = os.fork()
    if child == 0:
        os._exit(0 if pools[0].close() else 1)
    _, status = os.waitpid(child, 0)
    return "closed" if status == 0 else "not closed"


def _fork_and_drop(pools: list[Pool]) -> str:
    child = os.fork()
    if child == 0:
        fd = pools[0].fd
        pools.clear()  # the last reference
        try:
            os.fstat(fd)
        except OSError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    return "dropped" if status == 0 else "not dropped"


def _fork_and_use(pools: list[Pool]) -> list[object]:
    (pool,) = pools
    child = os.fork()
    if child == 0:
        try:
            pool._members.missing()
        except ValueError as error:
            text = str(error).encode()
            pool.row(1)[: 1 + len(text)] = b"\7" + text
        os._exit(0)
    os.waitpid(child, 0)
    return [pool.row(1)[0], bytes(pool.row(1)[1:]).rstrip(b"\0").decode()]


_IN_A_CHILD: dict[str, Callable[[list[Pool]], object]] = {
    "fork-close": _fork_and_close,
    "fork-drop": _fork_and_drop,
    "fork-use": _fork_and_use,
}


def _answer(pools: list[Pool], member: int, command: str, *arguments: str) -> object:
    if command in _IN_A_CHILD:
        return _IN_A_CHILD[command](pools)
    (pool,) = pools
    match command:
        case "wait":
            pool.wait_for_members(TIMEOUT_S)
            return "all"
        case "missing":
            return pool._members.missing()
        case "begin":
            pool.control.announce(member, Direction.STORE, int(arguments[0]))
            return "begun"
        case _:
            return _fork()


def main(name: str, member: int, num_workers: int) -> None:
    geometry = PoolGeometry(num_rows=4, row_bytes=4096, num_workers=num_workers)
    try:
        pools = [Pool.open(geometry, name, member)]
    except OSError as error:
        print(type(error).__name__, error, flush=True)
        return
    print(os.fstat(pools[0].fd).st_ino, flush=True)
    for line in sys.stdin:
        print(_answer(pools, member, *line.split()), flush=True)
    pools[0].close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
