"""How the processes of one engine come to share the pool, and the scheduler to know the engine.

vLLM starts the workers before the scheduler and tells none of them about the others, but all know the engine's id, and
the pool's name is made of it. Worker 0 makes the pool and leaves the engine's facts with it, for the scheduler, which
sees neither vLLM's resolved configuration nor the KV. Decides that all workers must have the same facts.
"""

import hashlib
import time

from kvtier_core import PoolError
from kvtier_core.transfer import SCHEDULER, Pool, PoolGeometry
from kvtier_vllm.facts import EngineFacts


def _name(engine_id: str) -> str:
    return hashlib.sha256(engine_id.encode()).hexdigest()[:40]


def open_as_worker(
    engine_id: str,
    rank: int,
    geometry: PoolGeometry,
    facts: EngineFacts,
    timeout_s: float,
    *,
    huge_pages: bool,
) -> Pool:
    """The pool of this engine, which worker 0 makes and the others wait for.

    Raises ``PoolError``: it does not fit, worker 0 has other facts or does not make it in time, or two engines use one
    id.
    """
    note = facts.to_bytes()
    try:
        pool = Pool.open(
            geometry, _name(engine_id), rank, note=note, huge_pages=huge_pages, timeout_s=timeout_s
        )
    except (MemoryError, OSError, ValueError) as error:
        raise PoolError(f"worker {rank} of the engine {engine_id!r}: {error}") from error
    if pool.note != note:
        pool.close()
        raise PoolError(
            f"worker {rank} of the engine {engine_id!r} has other facts about the engine than worker 0: all "
            "workers need one configuration"
        )
    return pool


def open_as_scheduler(engine_id: str, timeout_s: float, *, huge_pages: bool) -> tuple[Pool, EngineFacts]:
    """The pool that the workers share, and what they say of the engine. All of them have joined.

    vLLM has started every worker before. Raises ``PoolError`` when one has not joined in time, as when it is on another
    host: it would fill the rows of a pool of its own, and the part of this one's rows that is its would be anything.
    """
    deadline = time.monotonic() + timeout_s
    try:
        pool = Pool.open(None, _name(engine_id), SCHEDULER, huge_pages=huge_pages, timeout_s=timeout_s)
    except (OSError, ValueError) as error:
        raise PoolError(
            f"the scheduler of the engine {engine_id!r} found no pool: {error}. Workers on other hosts, or in other "
            "containers, are not supported"
        ) from error
    try:
        pool.wait_for_members(max(0.0, deadline - time.monotonic()))
        return pool, EngineFacts.from_bytes(pool.note)
    except BaseException as error:
        pool.close()
        if isinstance(error, TimeoutError):
            raise PoolError(f"the scheduler of the engine {engine_id!r}: {error}") from error
        raise
