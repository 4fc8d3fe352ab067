"""Contenders in turns, and the medians of what they took. Decides how rounds are taken, never what is measured."""

import os
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from kvtier_testing.bench.rows import Contender, Measured, Rows

GIB = 1 << 30
Passes = dict[tuple[str, str], list[Measured]]
"""By contender, and ``store`` or ``load``: one measure a round."""


def measure(contenders: Sequence[Contender], rows: Rows, rounds: int) -> Passes:
    """Let each contender store and load in every round; the measures of all rounds but the first.

    In a random order, and what one left to the kernel is written before the next: nobody always comes after the same.
    """
    measured: Passes = defaultdict(list)
    for number in range(rounds + 1):
        for contender in random.Random(number).sample(contenders, len(contenders)):  # noqa: S311 - no secret
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
