"""Draws what ``disk.py --json`` measured: ``python benchmarks/disk_plot.py RESULT.json docs/benchmarks/disk.svg``.

Bars of MB/s, by block size and direction. Plain SVG, so that it needs nothing installed.
"""

import json
import sys
from pathlib import Path

NAMES = {
    "ours": "kvtier",
    "ours_with_proofs": "kvtier with proofs",
    "bare": "bare calls",
    "fio": "fio",
    "fio_synced": "fio with a tier's syncs",
    "vllm": "vLLM fs",
}
COLOURS = dict(zip(NAMES, ("#1b6ca8", "#5fa8d3", "#9aa5b1", "#d08c2e", "#e3c08b", "#a63d40"), strict=True))
SIZES, WAYS = ("128KiB", "1MiB", "8MiB"), ("store", "load")
BAR, GAP, LEFT, HEIGHT = 16, 26, 56, 240


def draw(results: dict[str, dict[str, float]]) -> str:
    """The picture."""
    rates = {name: value["mb_per_s"] for name, value in results.items()}
    shown = [name for name in NAMES if f"{name}_store_1MiB" in rates]
    top = max(rates.values()) * 1.05
    parts, x = [], LEFT
    for way in WAYS:
        for size in SIZES:
            for name in shown:
                high = rates[f"{name}_{way}_{size}"] / top * HEIGHT
                parts.append(
                    f'<rect x="{x}" y="{20 + HEIGHT - high:.1f}" width="{BAR - 2}" height="{high:.1f}"'
                    f' fill="{COLOURS[name]}"/>'
                )
                x += BAR
            middle = x - BAR * len(shown) / 2
            parts.append(f'<text x="{middle}" y="{HEIGHT + 36}" text-anchor="middle">{way} {size}</text>')
            x += GAP
    step = 500 if top < 4000 else 1000  # noqa: PLR2004 - MB/s between two lines
    for rate in range(0, int(top), step):
        y = 20 + HEIGHT - rate / top * HEIGHT
        parts.insert(0, f'<line x1="{LEFT - 6}" x2="{x}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{rate}</text>')
    for index, name in enumerate(shown):
        at = LEFT + index * 150
        parts.append(f'<rect x="{at}" y="{HEIGHT + 52}" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{at + 18}" y="{HEIGHT + 62}">{NAMES[name]}</text>')
    parts.append(f'<text x="{LEFT - 46}" y="12">MB/s</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x}" height="{HEIGHT + 76}" font-family="sans-serif"'
        f' font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    """Read, draw, write."""
    source, target = map(Path, sys.argv[1:3])
    target.write_text(draw(json.loads(source.read_text().splitlines()[-1])["results"]))


if __name__ == "__main__":
    main()
