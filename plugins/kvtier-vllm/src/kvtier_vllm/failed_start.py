"""What a start that fails must not leave in its process.

vLLM keeps one connector a process, and ends it only with an engine that did start: after a failed start its worker's
pool, threads and shared memory would stay, and the next engine of the process would be given that connector. Decides
nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)


@contextmanager
def leaving_nothing(engine_id: str) -> Iterator[None]:
    """Where what is inside raises, end this process's connector, if it has one of the engine *engine_id*."""
    try:
        yield
    except BaseException:
        if has_kv_transfer_group() and _engine_of(get_kv_transfer_group()) == engine_id:
            ensure_kv_transfer_shutdown()
        raise


def _engine_of(connector: object) -> str | None:
    config = getattr(connector, "_vllm_config", None)
    return None if config is None else config.kv_transfer_config.engine_id
