"""Real SGLang on a CPU: engines with kvtier, started in processes of their own, and what they answer."""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = 16
SITE = Path(__file__).parent / "site"


@dataclass(frozen=True)
class Answer:
    """Tokens, their log probabilities, and how many tokens of the prompt SGLang did not compute."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


def _go_on(*_signal: object) -> None:
    """SGLang kills the process that ends one of two engines when it takes that for a crash: the tests go on."""


class Engine:
    """SGLang with kvtier; *arguments* are further ones of SGLang's."""

    def __init__(self, model: Path, *, config: Path | None = None, **arguments: object) -> None:
        from sglang import Engine as SGLang

        linker = {"linker": "KvtierLinker", "linker_module_path": "kvtier_sglang"}
        if config is not None:
            arguments |= {
                "enable_unified_cache_external_linker": True,
                "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": {
                    **linker,
                    "linker_extra_config": {"kvtier_config": str(config)},
                },
            }
        self._engine = SGLang(
            **{
                "model_path": str(model),
                "device": "cpu",
                "attention_backend": "torch_native",
                "dtype": "float32",
                "page_size": PAGE,
                "max_total_tokens": 4096,
                "max_running_requests": 4,
                "skip_tokenizer_init": True,
                "disable_overlap_schedule": True,
                "disable_cuda_graph": True,
                "skip_server_warmup": True,
                "random_seed": 1,
                "log_level": "info",
                "custom_sigquit_handler": _go_on,
                **arguments,
            }
        )

    def ask(self, *prompts: Sequence[int], tokens: int = 8, **more: Any) -> list[Answer]:
        """Greedy answers to prompts that are sent together."""
        found = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            return_logprob=True,
            **more,
        )
        return [
            Answer(
                [token for _, token, _ in item["meta_info"]["output_token_logprobs"]],
                [logprob for logprob, _, _ in item["meta_info"]["output_token_logprobs"]],
                item["meta_info"]["cached_tokens"],
            )
            for item in found
        ]

    def flush(self) -> None:
        """Empty the device's cache, once SGLang is idle."""
        deadline = time.monotonic() + 60
        while not self._engine.flush_cache().success:
            assert time.monotonic() < deadline, "SGLang did not become idle"
            time.sleep(0.05)

    def update_weights(self, model: Path, **more: Any) -> None:
        """Load other weights from disk."""
        success, message, *_ = self._engine.loop.run_until_complete(
            self._engine.tokenizer_manager.update_weights_from_disk(_update(model, **more), None)
        )
        assert success, message

    def close(self) -> None:
        """End all of its processes."""
        self._engine.shutdown()


def _update(model: Path, **more: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    return UpdateWeightFromDiskReqInput(model_path=str(model), load_format="auto", **more)


def environment() -> Mapping[str, str]:
    """What SGLang's processes need: the engine for CPUs, and the stand-ins."""
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(path)}


def prompt(name: str, count: int, vocab: int = 256) -> list[int]:
    """So many tokens, others for each name."""
    digits = b"".join(hashlib.sha256(f"{name} {part}".encode()).digest() for part in range(count // 32 + 1))
    return [2 + digit % (vocab - 2) for digit in digits[:count]]


def save_model(directory: Path, seed: int = 0) -> Path:
    """A tiny random Llama whose answers depend on all of the KV."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.25,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory
