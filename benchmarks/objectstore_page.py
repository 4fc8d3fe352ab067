"""Writes ``docs/benchmarks/objectstore.md`` from a file that ``objectstore.py --json`` printed into.

``python benchmarks/objectstore_page.py RUN.json``. Decides how it is shown. What does not come from that run says so.
"""

import argparse
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "objectstore.md"
LOOKUPS = {
    "lookup_1000_present_20ms_s": ("there, the tier has followed the bucket", 0.2, "2.23 s"),
    "lookup_1000_absent_20ms_s": ("absent, the tier has followed the bucket", 0.2, "2.38 s"),
    "lookup_1000_present_20ms_not_followed_s": ("there, with opening the tier", 0.2, "4.42 s"),
    "lookup_1000_absent_20ms_not_followed_s": ("absent, with opening the tier", 0.2, "3.39 s"),
}
"""In words, the aim in seconds, and what it took with one object a block through s3fs."""
RATE_AIMS = {"128KiB": 3.0}
RATE_AIM = 0.9
CPU_AIM = 1.3
SERVER_TIME = """\
## Where the time of a store goes

Not of this run: the server's own processor time, by the size of what obstore puts (64 MiB, 2 to 16 at a time, seconds a
GiB, medians of three):

| 128 KiB | 1 MiB | 2 MiB | 4 MiB | 8 MiB |
|---|---|---|---|---|
| 13.8 | 10.7 | 11.0 | 11.0 | 11.2 |

So on two cores packs can't be more than some 1.5 times as fast as single blocks on this server: (13.8 + 2.7) over
(11.2 + 0.3), the client's time included. Volumes of 1 GB instead of 64 MB, and a file system in memory, made hardly a
difference to that. Signing bodies without a digest took the client from 1.0 to 0.3 s a GiB at 8 MiB.
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, and an empty one."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def size_text(size: str) -> str:
    """``128KiB`` with a space."""
    return re.sub(r"(?<=\d)(?=\D)", " ", size)


def aims(run: dict[str, Any]) -> Iterator[tuple[str, float, str, bool]]:
    """Of each ratio with an aim: what it is in words, its value, the aim, and whether it is met."""
    ratios = run["ratios"]
    for size in run["sizes"]:
        for what in ("store", "load"):
            rate, least = ratios[f"{what}_{size}_vs_obstore"], RATE_AIMS.get(size, RATE_AIM)
            yield f"{what} {size_text(size)}, rate", rate, f"≥ {least:g}", rate >= least
            cpu = ratios[f"cpu_{what}_{size}_vs_obstore"]
            yield f"{what} {size_text(size)}, CPU time", cpu, f"≤ {CPU_AIM:g}", cpu <= CPU_AIM


def verdict(*, is_met: bool) -> str:
    """In a table."""
    return "yes" if is_met else "**no**"


def rates(run: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each contender and size."""
    for size in run["sizes"]:
        for name in ("ours", "obstore", "s3fs"):
            found = [run["results"].get(f"{name}_{what}_{size}") for what in ("store", "load")]
            if all(found):
                shown = [f"{one['mb_per_s']:g} ({one['cpu_s_per_gib']:.1f})" for one in found]
                yield [size_text(size), "kvtier" if name == "ours" else name, *shown]


def compression(run: dict[str, Any]) -> Iterator[str]:
    """The section on it, if it was measured."""
    if not run.get("compression"):
        return
    yield "## Compression"
    yield ""
    yield from textwrap.wrap(
        "Blocks packed and unpacked by one thread, processor time. Storing and loading pay on links that are slower "
        "than the bytes saved for each second of a core.",
        118,
    )
    yield ""
    rows = [
        [
            name,
            f"{one['smaller_by']:.2f} times",
            f"{one['pack_cpu_s_per_gib']:.1f}",
            f"{one['unpack_cpu_s_per_gib']:.1f}",
            f"{one['store_pays_below_mb_per_s']:.0f} MB/s",
            f"{one['load_pays_below_mb_per_s']:.0f} MB/s",
        ]
        for name, one in run["compression"].items()
    ]
    head = ("KV", "smaller", "packing, CPU s a GiB", "unpacking", "storing pays below", "loading pays below")
    yield from table(head, rows)


def page(run: dict[str, Any]) -> str:
    """The whole page."""
    found = list(aims(run))
    lines = [
        "# What the object-store tier measured",
        "",
        "This page is made by `benchmarks/objectstore_page.py` from one run of:",
        "",
        "```",
        f"python benchmarks/objectstore.py {run['command']}",
        "```",
        "",
        *textwrap.wrap(
            f"{run['date']}, SeaweedFS on loopback, {run['threads']} threads, {run['cores']} cores that client and "
            f"server share, load {run['load']:.1f} at the start. *kvtier* is the tier with packs, *obstore* and *s3fs* "
            "put one object a block. Ratios are medians over the rounds, each round's against the same round's.",
            118,
        ),
        "",
    ]
    if run["load"] > run["cores"]:
        lines += [
            "**The machine was busy with other work**: rates and their ratios say little, CPU time holds.",
            "",
        ]
    rows = [[what, f"{value:.2f}", aim, verdict(is_met=is_met)] for what, value, aim, is_met in found]
    lines += table(("kvtier over obstore", "ratio", "aim", "met"), rows)
    lines += table(
        ("lookup of 1,000 keys, each request 20 ms late", "before", "now", "aim", "met"),
        [
            [
                words,
                before,
                f"{run['ratios'][name]:.4f} s",
                f"≤ {aim} s",
                verdict(is_met=run["ratios"][name] <= aim),
            ]
            for name, (words, aim, before) in LOOKUPS.items()
        ],
    )
    lines += ["*Before* is one object a block through s3fs, of an earlier run.", ""]
    lines += table(("blocks", "", "store, MB/s (CPU s a GiB)", "load"), list(rates(run)))
    lines += compression(run)
    return "\n".join(lines) + "\n" + SERVER_TIME


def main() -> None:
    """Parse, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a file whose last line is what the run printed")
    run = json.loads(parser.parse_args().run.read_text().splitlines()[-1])
    PAGE.write_text(page(run))


if __name__ == "__main__":
    main()
