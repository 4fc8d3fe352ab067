"""Starts ``engine_program`` and speaks with it."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BLOCK = 32
VOCAB = 2048
START_S = 900.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None,
    reason="needs vLLM, which has an environment of its own: nox -s vllm",
)


def prompt(seed: int, blocks: int = 10, extra: int = 9) -> list[int]:
    """*blocks* whole blocks and *extra* tokens, the same for the same seed and unlike any other seed's."""
    tokens = random.Random(seed)
    return [tokens.randrange(1, VOCAB) for _ in range(blocks * BLOCK + extra)]


def connector(settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for kvtier with these settings."""
    return offloading("KvtierSpec", "kvtier_vllm", kvtier=settings, **options)


def vllms_tiering(tier: dict[str, Any], primary_bytes: int) -> dict[str, Any]:
    """The same for vLLM's own tiering with one *tier* behind its primary one, and kvtier's copy for a CPU's KV."""
    options = {"cpu_bytes_to_use": primary_bytes, "secondary_tiers": [tier]}
    return offloading("CPUTieringSpec", "tests.vllm.peer", **options)


def offloading(spec: str, module: str, **options: Any) -> dict[str, Any]:
    """The same for vLLM's offloading connector with a *spec*."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": spec, "spec_module_path": module, **options},
    }


def disk(root: Path, *, pool: str = "4MiB", layout: str = "extents", **settings: Any) -> dict[str, Any]:
    """Settings with a pool and a disk tier; a reset keeps the tier's blocks."""
    return {
        "pool": {"capacity": pool},
        "on_reset": "pool",
        "tiers": {"disk": {"type": "disk", "root": str(root), "layout": layout}},
        "lookup_order": ["disk"],
        **settings,
    }


def engine_options(
    model: Path, kv_transfer_config: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """vLLM's options for a tiny model."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 40,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "disable_log_stats": False,
        "kv_transfer_config": kv_transfer_config,
        **options,
    }


def assert_all_is_over(books: dict[str, Any]) -> None:
    """Nothing is held by anybody any more."""
    held = {name: books[name] for name in ("pins", "leases", "jobs", "detached", "requests")}
    assert not any(held.values()), f"when all is over the engine still holds {held}"


class EngineError(AssertionError):
    """The engine's program ended; the message is the end of what it said."""


class EngineProcess:
    """One engine in a process of its own."""

    def __init__(
        self,
        model: Path,
        log: Path,
        kv_transfer_config: dict[str, Any] | None = None,
        *,
        processes: int = 1,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._log = log
        own = dict(environment or {})
        if (
            "PYTHONPATH" in own and "PYTHONPATH" in os.environ
        ):  # the code under test is to be this one there, too
            own["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
        multi = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if processes == 1 else "1"}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("engine_program.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **QUIET, **multi, **own},
                start_new_session=True,
            )
        self._write(engine_options(model, kv_transfer_config, **options))
        assert self.read() == {"ready": True}

    def _write(self, message: dict[str, Any]) -> None:
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def read(self) -> Any:
        """The answer to what was sent."""
        line = self.process.stdout.readline()
        if not line:
            self._fail()
        return json.loads(line)

    def _fail(self) -> None:
        self.process.wait(START_S)
        self._close_pipes()
        raise EngineError(self.log()[-6000:])

    def log(self) -> str:
        """What the engine has logged so far."""
        return self._log.read_text(errors="replace")

    def send(self, do: str, **arguments: Any) -> None:
        """One command, without waiting for its answer."""
        self._write({"do": do, **arguments})

    def call(self, do: str, **arguments: Any) -> Any:
        """One command and its answer."""
        self.send(do, **arguments)
        return self.read()

    def generate(self, *prompts: Sequence[int], **arguments: Any) -> list[list[int]]:
        """The tokens that follow each prompt."""
        return [item["tokens"] for item in self.call("generate", prompts=prompts, **arguments)]

    def store(self, *prompts: Sequence[int]) -> list[list[int]]:
        """Generate, and see to it that the prompts' blocks are stored: vLLM stores in the steps after."""
        tokens = self.generate(*prompts)
        self.generate([1, 2, 3])
        return tokens

    def kill(self) -> None:
        """SIGKILL to the engine and whatever it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self._close_pipes()

    def close(self) -> int:
        """End the engine in an orderly way; its exit status."""
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(START_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._close_pipes()
        return self.process.returncode

    def _close_pipes(self) -> None:
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # what was still to be written has no reader any more
                pipe.close()
