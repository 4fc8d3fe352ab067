"""The pool's rows, registered with CUDA so that copies are asynchronous and fast: which bytes, and how.

The rows are in place by then: pinned pages can't be moved into huge ones. Decides nothing about what rows hold.
"""

import logging
import math
import mmap
import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier_core.transfer.memory import format_size
from kvtier_core.transfer.pool import Pool, PoolGeometry

_CALL_BYTES = 1 << 30
"""Pinned by one call: one for 512 GiB failed on others' machines, and a smaller one says sooner how far it is."""
_MOST_CALLS = 16_384
"""For parts of rows. Each may split the mapping in two, and Linux allows a process 65,530 mappings."""
_WORTH_A_CALL = 256 << 10
"""Bytes that are pinned in the time that one more call takes: 0.1 s a GB were published, 25 us a call is a guess."""
_TELL_S = 10.0

_log = logging.getLogger("kvtier.transfer")

Stretch = tuple[int, int]
"""From one byte to another, counted from the begin of row 0."""


class Registering(Protocol):
    """What is used of CUDA's runtime: both answer with an error, 0 for none."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int: ...  # noqa: N802, D102 - CUDA's name
    def cudaHostUnregister(self, address: int) -> int: ...  # noqa: N802, D102


def plan_pins(geometry: PoolGeometry, own: Stretch, page_bytes: int = mmap.PAGESIZE) -> list[Stretch]:
    """What a worker registers whose part of each row is *own*, in whole pages.

    No copy spans two stretches, and no page is in two. It is the worker's part of each row where that saves time, and
    the rows are few enough. Else it is whole rows, many at a time.
    """
    row_bytes, num_rows = geometry.row_bytes, geometry.num_rows
    begin, end = own[0] // page_bytes * page_bytes, -(-own[1] // page_bytes) * page_bytes
    is_worth_it = row_bytes - (end - begin) >= _WORTH_A_CALL and num_rows <= _MOST_CALLS
    if is_worth_it and row_bytes % page_bytes == 0:
        return [(row * row_bytes + begin, row * row_bytes + end) for row in range(num_rows)]
    step = math.lcm(row_bytes, page_bytes)  # where a row and a page begin
    call, whole = max(1, _CALL_BYTES // step) * step, -(-num_rows * row_bytes // page_bytes) * page_bytes
    return [(at, min(at + call, whole)) for at in range(0, whole, call)]


class PinnedRows:
    """One worker's registrations. All that it wants or none."""

    def __init__(
        self, pool: Pool, own: Stretch, cudart: Registering, enter_thread: Callable[[], object]
    ) -> None:
        """Register what ``plan_pins`` says, or log why not. Returns once that is done, at 3 to 10 GB/s.

        *enter_thread* is called on the thread that pins: CUDA remembers a refusal for the thread it happened on, and
        torch would take it for its next kernel's.
        """
        self._cudart = cudart
        self._addresses: list[int] = []
        thread = threading.Thread(target=self._pin, args=(pool, own, enter_thread), name="kvtier-pin")
        thread.start()
        thread.join()

    def release(self) -> None:
        """Unregister what was registered, before the pool's mapping goes. Twice is fine."""
        while self._addresses:
            self._cudart.cudaHostUnregister(self._addresses.pop())

    def _pin(self, pool: Pool, own: Stretch, enter_thread: Callable[[], object]) -> None:
        wanted = plan_pins(pool.geometry, own)
        try:
            enter_thread()
            refusal = self._register(pool, wanted)
        except BaseException as error:  # noqa: BLE001 - the device works without, and nobody sees this thread's errors
            refusal = f"{type(error).__name__}: {error}"
        if refusal is not None:
            self.release()
            _log.warning(
                "CUDA refused to pin the pool (%s): copies work, and are slower. %s",
                refusal,
                _advise(sum(end - begin for begin, end in wanted)),
            )

    def _register(self, pool: Pool, wanted: Sequence[Stretch]) -> str | None:
        """What CUDA has against it, if anything; what was registered until then stays so."""
        total, done = sum(end - begin for begin, end in wanted), 0
        progress = _Progress()
        while not pool.wait_for_prefault(_TELL_S):
            progress.tell("waiting for the pool's memory before %s of it are pinned", format_size(total))
        for begin, end in wanted:
            error = int(self._cudart.cudaHostRegister(pool.address + begin, end - begin, 0))
            if error != 0:
                return f"cudaHostRegister: error {error} at byte {begin} of {pool.geometry.describe()}"
            self._addresses.append(pool.address + begin)
            done += end - begin
            progress.tell("%s of %s of the pool are pinned", format_size(done), format_size(total))
        progress.end("%s of the pool were pinned", format_size(total))
        return None


class _Progress:
    """A line for every ten seconds, with how long it has taken. Short work is told of at the level INFO."""

    def __init__(self) -> None:
        self._begun = self._told = time.monotonic()

    def tell(self, text: str, *values: str) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_S:
            self._told = now
            _log.warning(text + " (after %.0f s)", *values, now - self._begun)

    def end(self, text: str, *values: str) -> None:
        seconds = time.monotonic() - self._begun
        level = logging.INFO if seconds < _TELL_S else logging.WARNING
        _log.log(level, text + " in %.1f s", *values, seconds)


def _advise(wanted: int) -> str:
    """What to do about a refusal."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return f"The limit on locked memory allows {format_size(wanted)}: make the pool smaller"
    return (
        f"This process may lock {format_size(limit)} and needs {format_size(wanted)}: raise the limit (ulimit -l; "
        "docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a unit of systemd)"
    )
