"""What no tier can better in ``vllm_e2e.py``: a prompt's KV copied once, and read from the disk and copied once."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from measuring import token_bytes

from kvtier_testing.bench.plain_file import Bare
from kvtier_testing.bench.rows import Rows

_PAGE = 4096
_CALL_BYTES = 4 << 20
_THREADS = 8
_COPIERS = 2
"""Threads of the copy, as many as kvtier's on a CPU."""


class Limit:
    """Moves as many bytes as the KV of *num_blocks* blocks takes, with nothing around it."""

    def __init__(self, model: Path, dtype: str, num_blocks: int, block_tokens: int, directory: Path) -> None:
        row_bytes = -(-block_tokens * token_bytes(model, dtype) // _PAGE) * _PAGE
        directory.mkdir(parents=True)
        self._rows = Rows(row_bytes, num_blocks * row_bytes, _CALL_BYTES)
        self._bare = Bare(directory, _THREADS)
        self._copy = np.ones(self._rows.total_bytes, np.uint8)

    def measure(self, times: int) -> dict[str, float]:
        """Medians over *times*: seconds of one copy (``pool_s``), and of one read past the page cache and a copy."""
        self._bare.store(self._rows, 0)
        reads = [self._bare.load(self._rows, 0).seconds for _ in range(times)]
        copies = [self._copy_once() for _ in range(times)]
        pool_s = statistics.median(copies)
        return {"excess_pool_s": pool_s, "excess_disk_s": statistics.median(reads) + pool_s}

    def _copy_once(self) -> float:
        pairs = zip(
            np.array_split(self._copy, _COPIERS), np.array_split(self._rows.array, _COPIERS), strict=True
        )
        with ThreadPoolExecutor(_COPIERS) as threads:
            begun = time.perf_counter()
            list(threads.map(lambda pair: np.copyto(*pair), pairs))
            return time.perf_counter() - begun

    def close(self) -> None:
        """Free the memory and remove the file."""
        self._bare.close()
        self._rows.close()
