"""How long the disk tier takes to read a prefix, beside reading as many bytes of the same files without it.

Decides what is compared: the tier's own calls, with as many threads and bytes a call as the core would use, against
``preadv`` past the page cache on the parts of the files that were written. Both fill the same memory, in turns.
"""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtier_core import Settings
from kvtier_core.engine import OffloadKey
from kvtier_core.tier import BlockTier, SupportsBatch, TierContext
from kvtier_transformers.demo.files import block_files, written_parts

_TURNS = 5
_CALL_BYTES = 4 << 20
"""What the core moves by one call."""


def read_vs_raw(
    settings: Settings, tier: str, root: Path, keys: Sequence[OffloadKey], row_bytes: int
) -> float | None:
    """The tier's time to read *keys* over the raw time for as many bytes: the median of several turns.

    ``None`` when the tier does not hold them all, or reads block by block.
    """
    config = settings.tiers[tier]
    cls: type[BlockTier] = settings.tier_types[tier].cls.for_settings(config)
    (namespace,) = (path.parent.name for path in root.glob("*/namespace.json"))
    opened = cls(config, TierContext(name=tier, namespace=namespace, row_bytes=row_bytes))
    opened.open()
    try:
        if not isinstance(opened, SupportsBatch) or not all(opened.contains(keys)):
            return None
        with mmap.mmap(-1, len(keys) * row_bytes) as memory, ThreadPoolExecutor(config.threads) as threads:
            return _compare(opened, keys, memory, row_bytes, _Raw(root, _CALL_BYTES), threads)
    finally:
        opened.close()


def _compare(
    tier: SupportsBatch,
    keys: Sequence[OffloadKey],
    memory: mmap.mmap,
    row_bytes: int,
    raw: "_Raw",
    threads: ThreadPoolExecutor,
) -> float | None:
    step = max(1, raw.batch // row_bytes)
    with memoryview(memory) as view:
        view[:] = bytes(len(view))  # page faults are nobody's reading

        def load(begin: int) -> bool:
            batch = keys[begin : begin + step]
            rows = [view[(begin + index) * row_bytes :][:row_bytes] for index in range(len(batch))]
            return all(outcome is True for outcome in tier.load_many(batch, rows))

        ratios = []
        for _ in range(_TURNS):
            ours, loaded = _timed(lambda: all(threads.map(load, range(0, len(keys), step))))
            if not loaded:
                return None
            theirs, _ = _timed(lambda: raw.read(view, threads))
            ratios.append(ours / theirs)
    return statistics.median(ratios)


class _Raw:
    """Reads what was written to the files below a directory, *batch* bytes a call."""

    def __init__(self, root: Path, batch: int) -> None:
        self.batch = batch
        self._root = root

    def read(self, view: memoryview, threads: ThreadPoolExecutor) -> None:
        """Fill *view*."""
        files: dict[Path, int] = {}
        try:
            for path in block_files(self._root):
                files[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
            parts = list(self._parts(len(view)))
            list(threads.map(lambda part: os.preadv(files[part[0]], [view[part[2]]], part[1]), parts))
        finally:
            for fd in files.values():
                os.close(fd)

    def _parts(self, wanted: int) -> Iterator[tuple[Path, int, slice]]:
        """File, offset and place in memory of each call."""
        done = 0
        while done < wanted:  # round again, if there is less
            for path in sorted(block_files(self._root), key=lambda path: -path.stat().st_size):
                for start, length in written_parts(path):
                    for offset in range(start, start + length, self.batch):
                        size = (
                            min(self.batch, start + length - offset, wanted - done)
                            // mmap.PAGESIZE
                            * mmap.PAGESIZE
                        )
                        if size:
                            yield path, offset, slice(done, done + size)
                            done += size


def _timed(work: Callable[[], object]) -> tuple[float, object]:
    started = time.perf_counter()
    answer = work()
    return time.perf_counter() - started, answer
