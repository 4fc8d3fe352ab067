"""The picture of ``kvtier bench``: bars for each size of a block, and a line where the disk by itself ends."""

import statistics
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kvtier_core.errors import ConfigError, KvtierError

Rates = Mapping[str, Mapping[tuple[str, str], Sequence[float]]]
"""MB/s of each round, sorted: by the size of a block, then by contender and ``store`` or ``load``."""
_GROUP = 0.8
"""The part of its place that a size's bars take."""


def require(file: Path) -> None:
    """Raise ``ConfigError`` where no picture can be drawn into *file*: a measurement takes minutes."""
    if not file.parent.is_dir():
        raise ConfigError(f"--svg {file}: there is no directory {file.parent}")
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("--svg needs matplotlib, which draws: pip install 'kvtier-testing[svg]'") from error


def draw(file: Path, title: str, rates: Rates, limit: str) -> None:
    """Draw stores and loads side by side. The contender called *limit* is a line, the others are bars."""
    matplotlib = import_module("matplotlib")
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 4), layout="constrained")
    figure.suptitle(title)
    stores, loads = figure.subplots(1, 2)
    _fill(stores, "store", rates, limit)
    _fill(loads, "load", rates, limit)
    figure.legend(*stores.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    # Text stays text, and the same rates give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvtier"}):
        try:
            figure.savefig(file, format="svg", metadata={"Date": None})
        except OSError as error:
            raise KvtierError(f"--svg {file}: {error.strerror}") from error


def _fill(axes: Any, what: str, rates: Rates, limit: str) -> None:  # noqa: ANN401 - no annotations there
    names = sorted({name for size in rates.values() for name, _ in size} - {limit})
    width = _GROUP / len(names)
    for number, name in enumerate(names):
        found = [size[name, what] for size in rates.values()]
        medians = [statistics.median(one) for one in found]
        below = [middle - one[0] for middle, one in zip(medians, found, strict=True)]
        above = [one[-1] - middle for middle, one in zip(medians, found, strict=True)]
        places = [place + (number + 0.5) * width - _GROUP / 2 for place in range(len(rates))]
        bars = axes.bar(places, medians, width, yerr=(below, above), capsize=3, label=name)
        axes.bar_label(bars, fmt="%.0f", padding=2)
    for place, size in enumerate(rates.values()):
        if one := size.get((limit, what)):
            ends = (place - _GROUP / 2 - 0.05, place + _GROUP / 2 + 0.05)
            label = limit if place == 0 else None
            axes.hlines(statistics.median(one), *ends, colors="black", linestyles="dashed", label=label)
    axes.set_title(f"{what}, MB/s")
    axes.set_xticks(range(len(rates)), list(rates))
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
