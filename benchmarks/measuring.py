"""What several benchmarks share: medians with intervals, prompts, bytes of KV. Decides how rounds are summed up."""

import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

RESAMPLES = 2000
_OUTSIDE = RESAMPLES // 40
"""Resamples left out at each end of a 95 % interval."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_Round = TypeVar("_Round")


def interval(values: Sequence[float]) -> dict[str, float]:
    """The median with its 95 % interval, by resampling."""
    return resampled(values, statistics.median)


def resampled(sample: Sequence[_Round], figure: Callable[[Sequence[_Round]], float]) -> dict[str, float]:
    """The *figure* of a sample of rounds with its 95 % interval, by resampling whole rounds."""
    choice = random.Random(0)
    found = sorted(figure(choice.choices(sample, k=len(sample))) for _ in range(RESAMPLES))
    ends = {"median": figure(sample), "low": found[_OUTSIDE], "high": found[-_OUTSIDE - 1]}
    return {name: round(value, 4) for name, value in ends.items()}


def print_intervals(intervals: dict[str, dict[str, float]]) -> None:
    """For people."""
    for name, value in intervals.items():
        print(f"{name:40} {value['median']:10.4f}  [{value['low']:.4f}, {value['high']:.4f}]")


def tokens(seed: str, count: int) -> list[int]:
    """*count* token ids, the same for the same seed."""
    choice = random.Random(seed)
    return [choice.randrange(100, 49000) for _ in range(count)]


def token_bytes(model: Path, dtype: str) -> int:
    """Bytes of KV a token of a plain model."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    head_size = config["hidden_size"] // config["num_attention_heads"]
    values: int = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size
    return values * _DTYPE_BYTES[dtype]
