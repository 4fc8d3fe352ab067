"""What the ways of ``peers.py`` answer after faults: damaged files, other weights, a kill, a limit, a full disk.

Every answer is compared with that of vLLM without connector. A tiny random model serves, whose next tokens depend on
all of the KV. Decides which faults there are, and what counts as wrong.
"""

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers_ways import BLOCK, WAYS, Running, Way, files, stored_bytes

from tests.vllm.engines import EngineError
from tests.vllm.models import save_tiny_model

PROMPTS = 6
TOKENS = 6 * BLOCK + 1
SIZES = {
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 128,
    "head_dim": 64,
}
TOKEN_BYTES = 2 * 8 * 4 * 64 * 4
LIMIT_BYTES = 32 << 20
"""About a third of what the prompts take."""
FULL_BYTES = 48 << 20
FLIP_EVERY = 64 << 10
_BLOCK_FILE_BYTES = 1 << 20
KILLS = 5
"""Tries to strike in the middle of a store."""
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "num_gpu_blocks_override": 64}
Answers = list[list[int]]


class Faults:
    """All cases of all ways, with one model and its twin of other weights."""

    def __init__(self, place: Path, threads: int, say: Callable[[str], None]) -> None:
        self._place, self._threads, self._say = place, threads, say
        self._model = place / "model"
        self._weights = [save_tiny_model(place / f"weights{seed}", seed=seed, **SIZES) for seed in (0, 1)]
        self._use(0)
        choice = random.Random(0)
        self._prompts = [[choice.randrange(1, 2048) for _ in range(TOKENS)] for _ in range(PROMPTS)]
        self._right = [self._asked_plainly(number) for number in (0, 1)]
        self._use(0)

    def _use(self, number: int) -> None:
        """Exchange the weights under the model's path."""
        shutil.rmtree(self._model, ignore_errors=True)
        shutil.copytree(self._weights[number], self._model)

    def _asked_plainly(self, number: int) -> Answers:
        self._use(number)
        with self._running(WAYS["none"], self._place / "none") as running:
            return running.engine.generate(*self._prompts)

    def _running(self, way: Way, root: Path, **options: Any) -> Running:
        log = self._place / f"{way.name}.log"
        return Running(way, self._model, root, log, threads=self._threads, **OPTIONS, **options)

    def run(self, way: Way) -> dict[str, Any]:
        """What each case gave: ``wrong`` of ``answers``, and how many of them were loaded at least in part."""
        found: dict[str, Any] = {}
        for case, work in (
            ("flipped bits", self._flipped),
            ("other weights", self._other_weights),
            ("killed", self._killed),
            ("limit", self._limited),
            ("full file system", self._full),
        ):
            if case == "flipped bits":
                self._fill(way)
            try:
                found[case] = work(way)
            except (EngineError, OSError) as error:
                found[case] = {
                    "failed": str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
                }
            self._say(f"{way.name}, {case}: {found[case]}")
        return found

    def _root(self, way: Way, case: str) -> Path:
        return self._place / f"{way.name}-{case}"

    def _fill(self, way: Way) -> None:
        with self._running(way, self._root(way, "filled")) as running:
            self._store(running)

    def _store(self, running: Running) -> None:
        running.engine.generate(*self._prompts)
        units = (TOKENS - 1) // running.way.unit * PROMPTS
        running.wait_stored(units * running.way.unit * TOKEN_BYTES, timeout=10.0)

    def _copied(self, way: Way, case: str) -> Path:
        return Path(shutil.copytree(self._root(way, "filled"), self._root(way, case)))

    def _flipped(self, way: Way) -> dict[str, Any]:
        root = self._copied(way, "flipped")
        flips = flip_bits(root)
        return {**self._ask(way, root), "bits": flips}

    def _other_weights(self, way: Way) -> dict[str, Any]:
        self._use(1)
        try:
            return self._ask(way, self._copied(way, "weights"), right=self._right[1])
        finally:
            self._use(0)

    def _ask(self, way: Way, root: Path, right: Answers | None = None, **options: Any) -> dict[str, Any]:
        """What a new process answers."""
        right = right or self._right[0]
        with self._running(way, root, **options) as running:
            said = running.engine.call("generate", prompts=self._prompts)
        return {
            "answers": len(said),
            "wrong": sum(one["tokens"] != wanted for one, wanted in zip(said, right, strict=True)),
            "loaded": sum(one["cached"] > 0 for one in said),
            "cached_tokens": sum(one["cached"] for one in said),
        }

    def _killed(self, way: Way) -> dict[str, Any]:
        """SIGKILL as soon as the first bytes of many are on their way; tried again where it came too late or too early.

        It struck in the middle where files had changed and a new process does not find all that was computed.
        """
        everything = (TOKENS - 1) // way.unit * way.unit * PROMPTS
        for number in range(KILLS):
            root = self._root(way, f"killed{number}")
            running = self._running(way, root)
            before = _sign(root)
            running.engine.send("generate", prompts=self._prompts)
            deadline = time.monotonic() + 60
            while _sign(root) == before and time.monotonic() < deadline:
                time.sleep(0.0005)
            running.kill()
            had_changed = _sign(root) != before
            found = self._ask(way, root)
            if (had_changed and found["cached_tokens"] < everything) or found["wrong"]:
                return {**found, "kills": number + 1, "in_the_middle": had_changed}
        return {"failed": f"none of {KILLS} kills struck in the middle of a store"}

    def _limited(self, way: Way) -> dict[str, Any]:
        if not way.has_limit:
            return {"failed": "it has no limit"}
        root = self._root(way, "limited")
        with self._running(way, root, limit_bytes=LIMIT_BYTES) as running:
            self._store(running)
            most = stored_bytes(root)
        return {
            **self._ask(way, root, limit_bytes=LIMIT_BYTES),
            "bytes": most,
            "limit": LIMIT_BYTES,
        }

    def _full(self, way: Way) -> dict[str, Any]:
        root = self._root(way, "full")
        with _small_file_system(root):
            with self._running(way, root / "kv") as running:
                self._store(running)
            return self._ask(way, root / "kv")


def flip_bits(root: Path) -> int:
    """Flip one bit in each started 64 KiB of all files: the highest of an exponent, were the bytes floats. How many."""
    flips = 0
    choice = random.Random(0)
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        with path.open("r+b") as file:
            size = path.stat().st_size
            for start in range(0, size, FLIP_EVERY):
                at = start + choice.randrange(min(FLIP_EVERY, size - start)) // 4 * 4 + 3
                if at < size:
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 0x40]))
                    flips += 1
    return flips


def _sign(root: Path) -> Sequence[Any]:
    """What changes once a block is being stored: the big files below *root*, their sizes and times."""
    return sorted(
        (name, status.st_size, status.st_mtime_ns)
        for name, status in files(root)
        if status.st_size >= _BLOCK_FILE_BYTES
    )


@contextmanager
def _small_file_system(where: Path) -> Iterator[None]:
    """A file system of its own at *where*, too small for all prompts. Raises ``OSError`` where none can be made."""
    where.mkdir()
    image = where.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(FULL_BYTES)
    try:
        for command in (
            ["mkfs.ext4", "-q", "-F", str(image)],
            ["mount", "-o", "loop", str(image), str(where)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"no small file system could be made: {done.stderr.strip()}")
        try:
            yield
        finally:
            subprocess.run(["umount", str(where)], check=True)
    finally:
        image.unlink()
