"""Real SGLang on a CPU: engines with kvtier, started in processes of their own, and what they answer."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

PAGE = 16
WINDOW = 64
SITE = Path(__file__).parent / "site"
OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "page_size": PAGE,
    "max_running_requests": 4,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
}
"""SGLang's arguments on a CPU."""
ARGUMENTS = {
    **OPTIONS,
    "max_total_tokens": 4096,
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "random_seed": 1,
    "log_level": "info",
}
"""And those of most tests."""
needs_sglang = pytest.mark.skipif(
    find_spec("sglang") is None,
    reason="needs SGLang, which has an environment of its own: nox -s sglang",
)


@dataclass(frozen=True)
class Answer:
    """Tokens, their log probabilities, and how many tokens of the prompt SGLang did not compute."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


class Engine:
    """SGLang with kvtier in a process of its own; *arguments* are further ones of SGLang's."""

    def __init__(self, model: Path, log: Path, *, config: Path | None = None, **arguments: object) -> None:
        self._log = log
        self._connection, theirs = Pipe()
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.sglang.program", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment()},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that all that the engine starts can be killed with it
            )
        try:
            self._connection.send({**ARGUMENTS, **linker(config), "model_path": str(model), **arguments})
            self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, *prompts: Sequence[int], tokens: int = 8, **more: Any) -> list[Answer]:
        """Greedy answers to prompts that are sent together."""
        found = self._call("ask", [list(prompt) for prompt in prompts], tokens, more)
        return [
            Answer(
                [token for _, token, _ in item["output_token_logprobs"]],
                [logprob for logprob, _, _ in item["output_token_logprobs"]],
                item["cached_tokens"],
            )
            for item in found
        ]

    def flush(self) -> None:
        """Empty the device's cache, once SGLang is idle."""
        self._call("flush")

    def clear_storage(self) -> None:
        """Have HiCache's storage forget all."""
        self._call("clear_storage")

    def update_weights(self, model: Path, **more: Any) -> None:
        """Load other weights from disk."""
        self._call("update_weights", str(model), more)

    def figures(self) -> Mapping[str, Any]:
        """What kvtier counts."""
        found: Mapping[str, Any] = self._call("figures")
        return found

    def log(self) -> str:
        """What SGLang has said so far."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """Kill all of its processes, as SGLang's own shutdown does. Twice is fine."""
        if self._process.returncode is None:  # until it is waited for, its number is no other's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()

    def _call(self, method: str, *arguments: object) -> Any:
        self._connection.send((method, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"SGLang has ended; its log ends:\n{self.log()[-6000:]}") from None


def linker(config: Path | None) -> Mapping[str, object]:
    """SGLang's arguments for kvtier with the settings in *config*; none without."""
    if config is None:
        return {}
    options = {
        "linker": "KvtierLinker",
        "linker_module_path": "kvtier_sglang",
        "linker_extra_config": {"kvtier_config": str(config)},
    }
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": options,
    }


def hicache(config: Path, layout: str = "layer_first") -> Mapping[str, Any]:
    """SGLang's arguments for HiCache that stores in kvtier. It has every page stored, and waits for what it loads."""
    options = {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KvtierHiCache",
        "interface_v1": 1,
        "kvtier_config": str(config),
        "prefetch_threshold": PAGE,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": layout,
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(options),
        "hicache_storage_prefetch_policy": "wait_complete",
    }


def environment() -> Mapping[str, str]:
    """What SGLang's processes need: the engine for CPUs, the stand-ins, and this process's path. SGLang is there."""
    path = [str(SITE), *filter(None, sys.path)]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models()),
        "SGLANG_USE_CPU_ENGINE": "1",
    }


def _other_models() -> list[str]:
    """The modules of models that no test has: each process of SGLang's would import all of them, 250 by now."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    modules = Path(spec.submodule_search_locations[0], "srt/models").glob("*.py")
    return sorted({module.stem for module in modules} - {"granite", "lfm2", "llama"})


def prompt(name: str, count: int, vocab: int = 256) -> list[int]:
    """So many tokens, others for each name."""
    digits = b"".join(hashlib.sha256(f"{name} {part}".encode()).digest() for part in range(count // 32 + 1))
    return [2 + digit % (vocab - 2) for digit in digits[:count]]


def save_model(directory: Path, seed: int = 0) -> Path:
    """A tiny random Llama whose answers depend on all of the KV."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=2, head_dim=16, **_SIZES)
    return _save(directory, LlamaForCausalLM, config, seed)


def save_windowed_model(directory: Path) -> Path:
    """A tiny random Granite: a layer of full attention, three whose window is ``WINDOW`` tokens, and sinks."""
    from transformers import GraniteSWAConfig, GraniteSWAForCausalLM

    config = GraniteSWAConfig(num_hidden_layers=4, head_dim=16, sliding_window=WINDOW, **_SIZES)
    return _save(directory, GraniteSWAForCausalLM, config)


def save_recurrent_model(directory: Path) -> Path:
    """A tiny random LFM2: two layers of full attention, and two that keep a state."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    layers = ["conv", "full_attention"] * 2
    config = Lfm2Config(
        num_hidden_layers=4,
        layer_types=layers,
        block_auto_adjust_ff_dim=False,
        tie_embedding=True,
        **_SIZES,
    )
    return _save(directory, Lfm2ForCausalLM, config)


_SIZES: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def _save(directory: Path, make: Callable[[Any], Any], config: object, seed: int = 0) -> Path:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        make(config).save_pretrained(directory)
    return directory
