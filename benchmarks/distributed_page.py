"""Writes the figures in ``docs/howto/many-machines.md`` from what ``distributed.py`` and ``handover.py`` printed.

``python benchmarks/distributed_page.py DISTRIBUTED.json [HANDOVER.json]``. Replaces what stands between the page's
marks. Decides how the figures are shown.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from objectstore_page import size_text, table

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "many-machines.md"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
WAYS = {
    "valkey+_1_thread": "Valkey, 1 thread",
    "valkey": "Valkey",
    "mooncake": "Mooncake",
    "mooncake+_4_threads": "Mooncake, 4 threads",
}
"""As ``distributed.py`` names what it tried, and in words."""
SIZES = ("128KiB", "1MiB")
_BUSY = 1.0
"""Load of the machine before the run, from which on its rates are in doubt."""
STEPS = {
    "store": "the first engine's job, from its pool to the server's last answer",
    "visible": "from the first token there until all blocks are seen in the server",
    "lookup": "the second engine's question",
    "load": "from the server into its pool, checked",
    "first_token_here": "from the request to the second engine's first token, lookup and load included",
    "between": "from the first token there to the first token here",
    "computed": "for comparison: the first token where everything is computed",
}


def rates(run: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each way, size and direction."""
    for way, words in WAYS.items():
        store, _, ending = way.partition("+")
        for size in SIZES:
            for what in ("store", "load"):
                name = f"{store}_{what}_{size}{ending}"
                if f"{name}_vs_bare" in run["ratios"]:
                    took = [
                        run["results"][f"{who}_{what}_{store}_{size}{ending}"]
                        for who in ("ours", "bare", "proven")
                    ]
                    yield [
                        f"{words}, {size_text(size)}, {what}",
                        f"{took[0]['mb_per_s']:.0f}",
                        *(f"{run['ratios'][f'{name}_vs_{who}']:.2f}" for who in ("bare", "proven")),
                        *(f"{one['cpu_s_per_gib']:.2f}" for one in took),
                    ]


def lookups(run: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each latency."""
    for name, seconds in run["lookups"].items():
        if not name.endswith("_engine_s"):
            _, _, count, latency, _ = name.split("_")
            engine = run["lookups"][f"{name.removesuffix('_s')}_engine_s"]
            yield [size_text(latency), count, f"{seconds * 1e3:.0f} ms", f"{engine * 1e3:.1f} ms"]


def lines(run: dict[str, Any], handover: dict[str, Any] | None) -> Iterator[str]:
    """What stands between the marks."""
    yield (
        f"Measured {run['date']} on {run['cores']} cores that the server shares, over loopback, {run['blocks']} "
        f"blocks, median of {run['rounds']} rounds: `benchmarks/distributed.py`. Load of the machine before: "
        f"{run['load']:.1f}."
    )
    yield ""
    yield (
        "The whole manager, proofs included, beside the store's bare client on the same memory, and beside that client "
        "when it makes and checks proofs as well. Then the processor time of each, in seconds a GiB, without that of "
        "the server. The manager gets four prompts and looks the next one up while the one before loads. The bare "
        "client asks for all blocks at once and looks nothing up."
    )
    if run["load"] > _BUSY:
        yield "The machine was busy meanwhile: the rates say little, the processor times more."
    yield ""
    head = ["", "MB/s", "beside bare", "beside bare with proofs", "CPU", "bare", "bare with proofs"]
    yield from table(head, list(rates(run)))
    yield (
        "A lookup of blocks that are all there, in Valkey, and the longest that one call took the engine's thread "
        "meanwhile:"
    )
    yield ""
    yield from table(["latency", "keys", "answered after", "engine's thread"], list(lookups(run)))
    if handover is not None:
        yield (
            f"Prefill in one vLLM, decode in another, a Valkey server between: {handover['blocks']} blocks of "
            f"{handover['row_bytes'] >> 10} KiB, a tiny model, median of {handover['rounds']} rounds: "
            "`benchmarks/handover.py`."
        )
        yield ""
        yield from table(
            ["step", "", "ms"],
            [[name, words, f"{handover['seconds'][name] * 1e3:.1f}"] for name, words in STEPS.items()],
        )


def replaced(page: str, run: dict[str, Any], handover: dict[str, Any] | None) -> str:
    """The *page* with these figures between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(lines(run, handover)) + END + after


def main() -> None:
    """Parse, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("handover", type=Path, nargs="?")
    arguments = parser.parse_args()
    run = _printed(arguments.run)
    handover = None if arguments.handover is None else _printed(arguments.handover)
    PAGE.write_text(replaced(PAGE.read_text(), run, handover))


def _printed(file: Path) -> dict[str, Any]:
    """The object on the last line."""
    found: dict[str, Any] = json.loads(file.read_text().strip().rpartition("\n")[2])
    return found


if __name__ == "__main__":
    main()
