"""Writes ``docs/benchmarks/peers.md`` from what ``peers.py --json`` printed: ``peers_page.py RUN.json [LATER.json]``.

A later run need not have all parts: it replaces those that it has.

Decides how it is shown, and what may be: nothing allows figures of lifeboatcache in public.
"""

import argparse
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peers import summarize
from peers_ways import WAYS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "peers.md"
UNPUBLISHED = {
    "lifeboatcache": (
        "it is proprietary, and its package has no licence text that would allow figures of it to be published. "
        "Its times are not taken, and its answers after faults are not shown"
    )
}
TITLES = {
    "none": "no connector",
    "kvtier": "kvtier",
    "vllm_fs": "vLLM tiering, `fs`",
    "lmcache_fs": "LMCache server, `fs`",
    "lmcache_fs_native": "LMCache server, `fs_native`",
    "lmcache_in_process": "LMCache in process",
}
AIMS = {
    "host_3841_vs_lmcache": ("≤", 0.6),
    "disk_3841_vs_lmcache": ("≤", 0.6),
    "warm_files_3841_vs_best": ("≤", 1.0),
    "conversations_vs_lmcache": ("≥", 1.1),
}
RATIOS = {
    "host_3841_vs_lmcache": "3,841 tokens from host memory, over the best of LMCache",
    "disk_3841_vs_lmcache": "3,841 tokens from disk, page cache dropped, over the best of LMCache",
    "warm_files_3841_vs_best": "3,841 tokens from files as they were left, over the best of all others",
    "conversations_vs_lmcache": "tokens a second in conversations, over the best of LMCache",
}
TIMES = [
    (f"{what}, {length:,} tokens", f"{figure}_{length}")
    for figure, what in (
        ("cold", "cold"),
        ("host", "host memory"),
        ("left", "disk, files as left"),
        ("dropped", "disk, dropped"),
    )
    for length in (1281, 3841, 4000)
]
CASES = ("flipped bits", "other weights", "killed", "limit", "full file system")
MIB = 1 << 20


def shown(run: dict[str, Any]) -> list[str]:
    """The ways whose figures are on the page, in order."""
    there = {name for part in run["raw"].values() for name in part}
    return [name for name in TITLES if name in there and WAYS[name].product not in UNPUBLISHED]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; rows without a figure are left out."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        if any(row[1:]):
            yield f"| {' | '.join(row)} |"
    yield ""


def figure(run: dict[str, Any], name: str, form: str) -> str:
    """A median with its interval."""
    found = run["figures"].get(name)
    if found is None:
        return ""
    return f"{found['median']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def summary(run: dict[str, Any], ways: Sequence[str]) -> Iterator[str]:
    """Versions, ratios and what is missing."""
    versions = {name: found for name, found in run["peers"].items() if name != "none"}
    named = ", ".join(f"{name} {found}" for name, found in versions.items() if name not in UNPUBLISHED)
    yield f"{named}, in one vLLM on one machine without a GPU, {run['machine']['date']}."
    yield ""
    rows = [
        [
            RATIOS[name],
            told(ratio),
            " ".join(map(str, AIMS[name])),
            told(ratio) if ratio is None else "yes" if is_met(name, ratio) else "**no**",
        ]
        for name, ratio in run["ratios"].items()
    ]
    yield from table(["kvtier over others", "ratio", "aim", "met"], rows)
    yield "Of seconds less is better, of tokens a second more."
    yield ""
    for length, found in run["floor"]["floor_s"].items():
        yield (
            f"- The floor, {int(length):,} tokens: as many bytes read past the page cache and then copied once took "
            f"{found['median']:.3f} s [{found['low']:.3f}, {found['high']:.3f}]. No tier that reads first and then "
            "copies is faster from this disk."
        )
    if "disk_3841_vs_lmcache" in run["floor"]:
        over = told(run["floor"]["disk_3841_vs_lmcache"])
        yield f"- The floor over the best of LMCache, 3,841 tokens from disk, page cache dropped: {over}."
    if "conversations_vs_lmcache" in run["floor"]:
        over = told(run["floor"]["conversations_vs_lmcache"])
        yield (
            "- Conversations without any store or load, over the best of LMCache: "
            f"{over}. That is vLLM without connector, with a device's cache that holds all of them."
        )
    yield ""
    reasons = {**{WAYS[name].product: why for name, why in run["absent"].items()}, **UNPUBLISHED}
    for product, why in reasons.items():
        yield f"- **{product}**: {why}."
    yield ""
    yield "## Where kvtier loses"
    yield ""
    yield from losses(run, ways)


def told(ratio: float | None) -> str:
    """A ratio as the page shows it; None where a figure of it was noise."""
    return "not measurable" if ratio is None else f"{ratio:.2f}"


def is_met(name: str, ratio: float) -> bool:
    """Whether a ratio is as it should be."""
    sign, limit = AIMS[name]
    return ratio <= limit if sign == "≤" else ratio >= limit


def losses(run: dict[str, Any], ways: Sequence[str]) -> Iterator[str]:
    """Every figure in which somebody is better than kvtier, by medians."""
    better = "higher", "lower"
    found = []
    for title, name, form, wants_more in [
        *((title, name, ".3f", False) for title, name in TIMES if not name.startswith("cold")),
        ("tokens a second in conversations", "tokens_per_s", ".0f", True),
    ]:
        ours = run["figures"].get(f"kvtier.{name}")
        for way in ways:
            theirs = run["figures"].get(f"{way}.{name}")
            if way in ("kvtier", "none") or not ours or not theirs or theirs["median"] == ours["median"]:
                continue
            if (theirs["median"] > ours["median"]) == wants_more:
                found.append(
                    f"- {title}: {TITLES[way]} {theirs['median']:{form}}, kvtier {ours['median']:{form}}"
                    f" ({better[not wants_more]} is better)."
                )
    for title, read in TAKEN.items():
        ours_taken = taken(run, "kvtier", read)
        for way in ways:
            theirs_taken = taken(run, way, read)
            if way not in ("kvtier", "none") and ours_taken and theirs_taken and theirs_taken < ours_taken:
                found.append(f"- {title}: {TITLES[way]} {theirs_taken:.0f}, kvtier {ours_taken:.0f}.")
    yield from found or ["In no figure of this run."]
    yield ""


TAKEN: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "memory of all processes (PSS), MiB": lambda found: found["pss_bytes"] / MIB,
    "bytes on disk, MiB": lambda found: found["disk_bytes"] / MIB if found["disk_bytes"] else None,
    "seconds to start": lambda found: found.get("start_s"),
}


def taken(run: dict[str, Any], way: str, read: Callable[[dict[str, Any]], float | None]) -> float | None:
    """What a way took in the part on reloads."""
    found = run["raw"].get("reload", {}).get(way)
    return read(found) if found else None


def times(run: dict[str, Any], ways: Sequence[str]) -> Iterator[str]:
    """Seconds, conversations, memory and disk."""
    yield "## Seconds to the first token"
    yield ""
    yield "Cold: all of it. Others: beyond the device's cache. Medians with 95 % intervals over the prompts."
    yield ""
    rows = [[title, *(figure(run, f"{way}.{name}", ".3f") for way in ways)] for title, name in TIMES]
    yield from table(["", *(TITLES[way] for way in ways)], rows)
    yield (
        "Prompts of 1,281 and 3,841 tokens leave one token to compute in every way. Of 4,000 tokens each keeps whole "
        "units of its own size (kvtier and vLLM 128 tokens, LMCache 256), and computes the rest again."
    )
    yield ""
    yield "## What they take"
    yield ""
    rows = [
        [title, *("" if (value := taken(run, way, read)) is None else f"{value:.0f}" for way in ways)]
        for title, read in TAKEN.items()
    ]
    kept = [
        "KV stored, MiB",
        *(f"{(taken(run, way, lambda found: found['kv_bytes'] / MIB) or 0):.0f}" for way in ways),
    ]
    rows.append(kept)
    rows.append(
        ["tokens a second, conversations", *(figure(run, f"{way}.tokens_per_s", ".0f") for way in ways)]
    )
    yield from table(["", *(TITLES[way] for way in ways)], rows)
    yield "kvtier reserves its files ahead: part of its bytes on disk is room for the next blocks."
    yield ""


def faults(run: dict[str, Any], ways: Sequence[str]) -> Iterator[str]:
    """Wrong answers."""
    found = run["raw"].get("faults")
    if not found:
        return
    there = [way for way in ways if way in found]
    yield "## After faults"
    yield ""
    yield (
        "Wrong answers of all answers, compared with vLLM without a connector; in brackets the answers of which at "
        "least a part was loaded. A tiny random model, whose next tokens depend on all of the KV."
    )
    yield ""
    rows = [[case, *(answers(found[way].get(case, {})) for way in there)] for case in CASES]
    yield from table(["", *(TITLES[way] for way in there)], rows)
    yield "- *Flipped bits*: one in each 64 KiB of all files. *Other weights*: exchanged under the same path."
    yield "- *Killed*: SIGKILL to all processes in the middle of a store: files had changed, not all was found later."
    yield "- *Limit*: a third of what the prompts take; the most bytes that were on the disk stand behind it."
    yield ""


def answers(found: dict[str, Any]) -> str:
    """One cell."""
    if "failed" in found:
        return str(found["failed"])
    if "wrong" not in found:
        return ""
    text = f"{found['wrong']} of {found['answers']} ({found['loaded']})"
    if found["wrong"]:
        text = f"**{text}**"
    if "limit" in found:
        text += f"; {found['bytes'] / MIB:.0f} of {found['limit'] / MIB:.0f} MiB"
    return text


def method(run: dict[str, Any], ways: Sequence[str]) -> Iterator[str]:
    """How it was measured, and what was changed."""
    machine = run["machine"]
    yield "## How it was measured"
    yield ""
    yield (
        f"`nox -s peers -- --json`; SmolLM2-135M in {machine['dtype']}, {machine['threads']} compute threads. "
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB of memory, Linux "
        f"{machine['kernel']}, Python {machine['python']}."
    )
    yield ""
    yield (
        f"- Every way has {machine['host_bytes'] >> 30} GiB of host memory, blocks of 128 tokens in vLLM's cache, and "
        "its maker's defaults else. Ways come in an order drawn at random."
    )
    yield (
        "- Disk means a new process (and a new LMCache server). Its first load, of another prompt, warms up. "
        "*Dropped*: the files are out of the page cache."
    )
    yield (
        "- Conversations: 8 of 3 turns from 600 to 1,000 tokens, two at a time; the device's cache holds 3,584 tokens, "
        "and all of them where there is no connector. All engines run side by side and take turns."
    )
    yield (
        "- Memory is PSS: of a page that several processes map, each has its share. RSS counts kvtier's pool and "
        "LMCache's shared memory once a process."
    )
    for way in ways:
        if note := run["notes"].get(way):
            yield f"- {TITLES[way]}: {note}."
    if "lmcache_in_process" in ways:
        yield "- LMCache in process forgets what is on its disk when it ends, so it has no figures for a new process."
    if len(taken_on := run.get("runs", ())) > 1:
        yield f"- From several runs ({'; '.join(taken_on)}): each part is of the last that has it."
    yield ""


def page(run: dict[str, Any]) -> str:
    """The whole page."""
    ways = shown(run)
    parts = (summary(run, ways), times(run, ways), faults(run, ways), method(run, ways))
    lines = ["# kvtier beside LMCache and vLLM's own tiering", "", *(line for part in parts for line in part)]
    return "\n".join(wrapped for line in lines for wrapped in wrap(line)).rstrip() + "\n"


def wrap(line: str) -> list[str]:
    """Lines of a page; tables and titles stay as they are."""
    if line.startswith(("|", "#")) or not line:
        return [line]
    indent = "  " if line.startswith("- ") else ""
    return textwrap.wrap(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run, of which each part is from the last run that has it."""
    raw = {part: found for run in runs for part, found in run["raw"].items()}
    joined = {
        name: {k: v for run in runs for k, v in run[name].items()} for name in ("peers", "absent", "notes")
    }
    told_runs = [f"{', '.join(run['raw'])} on {run['machine']['date']}" for run in runs]
    return {**runs[-1], **joined, **summarize(raw), "raw": raw, "runs": told_runs}


def main() -> None:
    """Read the runs, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="what peers.py --json printed, the oldest first; the last line counts",
    )
    options = parser.parse_args()
    PAGE.write_text(page(merged([json.loads(run.read_text().splitlines()[-1]) for run in options.runs])))


if __name__ == "__main__":
    main()
