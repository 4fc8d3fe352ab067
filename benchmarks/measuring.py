"""What several benchmarks share: contenders in turns, medians and their intervals, prompts, bytes of KV.

Decides how rounds are taken and summed up, never what is measured.
"""

import json
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from disk_contenders import Contender, Measured, Rows

GIB = 1 << 30
RESAMPLES = 2000
_OUTSIDE = RESAMPLES // 40
"""Resamples left out at each end of a 95 % interval."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Passes = dict[tuple[str, str], list[Measured]]
"""By contender, and ``store`` or ``load``: one measure a round."""
_Round = TypeVar("_Round")


def measure(contenders: Sequence[Contender], rows: Rows, rounds: int) -> Passes:
    """Let each contender store and load in every round; the measures of all rounds but the first.

    In a random order, and what one left to the kernel is written before the next: nobody always comes after the same.
    """
    measured: Passes = defaultdict(list)
    for number in range(rounds + 1):
        for contender in random.Random(number).sample(contenders, len(contenders)):
            for what, work in (("store", contender.store), ("load", contender.load)):
                one = work(rows, number)
                if number > 0:
                    measured[contender.name, what].append(one)
            contender.clear()
            os.sync()
    return measured


def summarize_passes(size: str, measured: Passes, rows: Rows) -> dict[str, object]:
    """Medians of one block size."""
    return {
        f"{name}_{what}_{size}": {
            "mb_per_s": round(statistics.median(rows.total_bytes / one.seconds for one in all_) / 1e6, 1),
            "cpu_s_per_gib": cpu_s_per_gib(all_, rows),
            "kernel_s_per_gib": kernel_s_per_gib(all_, rows),
        }
        for (name, what), all_ in measured.items()
    }


def cpu_s_per_gib(measured: Sequence[Measured], rows: Rows) -> float:
    """The median of the processor time."""
    return round(statistics.median(one.cpu_s for one in measured) / rows.total_bytes * GIB, 4)


def kernel_s_per_gib(measured: Sequence[Measured], rows: Rows) -> float | None:
    """The median of the processor time in the kernel, where all of it is known."""
    known = [one.kernel_s for one in measured if one.kernel_s is not None]
    return round(statistics.median(known) / rows.total_bytes * GIB, 4) if known else None


def ratio(
    measured: Passes,
    what: str,
    over: str,
    under: str,
    figure: Callable[[Measured], float] = lambda one: one.seconds,
) -> float:
    """The *figure* of the one over that of the other: the median over rounds, each against the other's same round."""
    pairs = zip(measured[over, what], measured[under, what], strict=True)
    return round(statistics.median(figure(one) / figure(other) for one, other in pairs), 3)


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
