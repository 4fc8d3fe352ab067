"""Damages the files of a persistent tier, while it runs and between starts, and looks at what it makes of them.

``python -m kvtier_testing.corrupt --tier disk --corruptions 10000 --json``. Each damage hits one file below the
tier's directory: a bit flips, a range becomes zeros or noise, the file is cut, grows, swaps parts, is what it was some
time ago, goes, gets another name or a double. Then the tier must give complete blocks or none, go on or open again, and
take every block that is lost. Engines are processes of their own, so that one that ends is counted and ends nothing
else; they are stopped while a file is damaged, so that what was hit is known.

A block is *lost beyond damage* when the damage hit none of its bytes and it does not come back. That is no
failure, but a price: the report says by which file's damage, and what the tier had warned of.

A run is made of episodes, each with a new directory, that depend on the seed and their number alone, as far as the
machine's timing lets them; ``--episode`` repeats one, and says what it does. Decides nothing about a tier but what is
damaged. The status is 0 when nothing went wrong.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from kvtier_core.errors import KvtierError
from kvtier_core.plugins import load_tier_type
from kvtier_testing.corrupt_processes import Engine, Seen, keys_of
from kvtier_testing.corruptions import Corruption, contents_of, corrupt
from kvtier_testing.rows import RowMaker
from kvtier_testing.subjects import Subject, fork, make_subject

_MAKER = RowMaker("corrupt", 16_000)
_STEPS = 25  # damages an episode
_ONLINE = 0.6
_KILLED = 0.5  # of the engines that end before a damage between starts
_TWO_ENGINES = 0.3
_REMEMBER_EVERY = 4  # damages: what a stale copy is a copy of
_SMALL = {"capacity": "4MiB", "extent_size": "1MiB", "min_free": 0, "refresh": "0.02s"}
_FAILURES = ("wrong_bytes", "process_ends", "refused_to_open", "unstorable")
_MOST_TOLD = 20


@dataclass(kw_only=True)
class Found:
    """What the damages did, counted."""

    counts: Counter[str] = field(default_factory=Counter)
    by_way: Counter[str] = field(default_factory=Counter)
    by_file: Counter[str] = field(default_factory=Counter)
    lost_by_file: Counter[str] = field(default_factory=Counter)
    lost_by_warning: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Found") -> None:
        """Count the other's too."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(mine, Counter):
                mine.update(value)
            else:
                mine.extend(value)


class Episode:
    """One directory, damaged again and again, with one or two engines on it."""

    def __init__(self, subject: Subject, root: Path, rng: random.Random, *, tell: bool) -> None:
        self._subject = subject
        self._root = root
        self._rng = rng
        self._tell = tell
        self.found = Found()
        self._engines: list[Engine] = []
        self._is_whole = False  # whether all blocks were there when last seen
        self._old: dict[str, bytes] = {}
        self._told: list[str] = []  # what the engines warned of at the last look
        self._untouched: list[bool] = []  # of each block, whether the last damage left all its bytes
        self._rows = [_MAKER.make(key) for key in keys_of(0)]

    def run(self, steps: int) -> bool:
        """Damage so often; false when that ended before, because something went wrong."""
        self._start(2 if self._rng.random() < _TWO_ENGINES else 1)
        try:
            if not self._look(None):
                return False
            self._old = contents_of(self._root)
            for step in range(steps):
                if not self._step():
                    return False
                if step % _REMEMBER_EVERY == 0:
                    self._old = contents_of(self._root)
            return True
        finally:
            for engine in self._engines:
                engine.end(kill=True)

    def _start(self, count: int) -> None:
        self._engines = [Engine(self._subject, number) for number in range(count)]

    def _step(self) -> bool:
        if self._rng.random() < _ONLINE:
            done = self._damage_online(self._engines)
        else:
            engines, self._engines = self._engines, []
            kill = self._rng.random() < _KILLED
            ends = [engine.end(kill=kill) for engine in engines]
            if not all(ends):
                self._fail("process_ends", f"while it closed: {[engine.status for engine in engines]}")
                return False
            done = self._damage("between starts")
            self._start(len(engines))
        return self._look(done)

    def _damage_online(self, engines: Sequence[Engine]) -> Corruption | None:
        if not engines:
            return self._damage("online")
        with engines[0].stopped():
            return self._damage_online(engines[1:])

    def _damage(self, when: str) -> Corruption | None:
        before = self._copies()
        done = corrupt(self._root, self._old, self._rng)
        if done is not None:
            self.found.counts[when.replace(" ", "_")] += 1
            self.found.by_way[done.how] += 1
            self.found.by_file[done.kind] += 1
            if self._tell:
                sys.stderr.write(f"{when}: {done}\n")
        self._untouched = [after >= count > 0 for count, after in zip(before, self._copies(), strict=True)]
        return done

    def _copies(self) -> list[int]:
        """How often the bytes of each block are in files, old copies in unused places among them."""
        contents = contents_of(self._root).values()
        return [sum(content.count(row) for content in contents) for row in self._rows]

    def _look(self, done: Corruption | None) -> bool:
        """Let every engine look; false when one has ended, or did not open."""
        first: Seen | None = None
        before, self._told = self._told, []
        for engine in list(self._engines):
            seen = engine.look()
            if seen is None:
                self._engines.remove(engine)
                self._fail("process_ends", f"status {engine.status} after {done}")
                return False
            if seen.refused:
                self._fail("refused_to_open", f"{seen.refused} after {done}")
                return False
            self._count(done, seen)
            self._told += seen.warnings
            first = first or seen
        if first is not None:
            self._count_lost(done, first, list(dict.fromkeys([*before, *self._told])))
        return True

    def _count(self, done: Corruption | None, seen: Seen) -> None:
        self.found.counts["exact_blocks"] += len(seen.exact)
        self.found.counts["unproven_blocks"] += seen.unproven
        if seen.wrong:
            self._fail("wrong_bytes", f"after {done}", seen.wrong)
        if seen.unstorable:
            self._fail("unstorable", f"after {done}; {list(seen.warnings)}", seen.unstorable)

    def _count_lost(self, done: Corruption | None, seen: Seen, told: Sequence[str]) -> None:
        """Count what *seen* lacks; *told* are the warnings since the look before the damage.

        Any engine may have warned, and already of the damage before this one: its blocks go when that is noticed.
        """
        if self._is_whole and done is not None:
            lost = set(range(len(self._rows))) - set(seen.exact)
            untouched = sum(self._untouched[number] for number in lost)
            self.found.counts["lost_blocks"] += len(lost)
            self.found.counts["lost_beyond_damage"] += untouched
            if untouched:
                self.found.lost_by_file[f"{done.how} {done.kind}"] += untouched
                self.found.lost_by_warning["; ".join(told) or "no warning"] += untouched
                if self._tell:
                    sys.stderr.write(f"  lost {untouched}: {list(told)}\n")
        self._is_whole = not seen.unstorable

    def _fail(self, what: str, text: str, count: int = 1) -> None:
        self.found.counts[what] += count
        self.found.failures.append(f"{what}: {text}")


def run_episode(subject: Subject, directory: Path, seed: int, number: int, *, tell: bool = False) -> Found:
    """Damage ``_STEPS`` times, with a new directory whenever something went wrong."""
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - no secret
    found = Found()
    while (done := found.by_way.total()) < _STEPS:
        with tempfile.TemporaryDirectory(dir=directory, prefix=f"episode-{number}-") as name:
            root = Path(name) / "root"
            episode = Episode(subject.at(root), root, rng, tell=tell)
            episode.run(_STEPS - done)
            episode.found.failures = [f"episode {number}: {text}" for text in episode.found.failures]
            found.add(episode.found)
            if not episode.found.by_way:
                break  # it does not even open where nothing is damaged
    return found


def run(subjects: Sequence[Subject], directory: Path, seed: int, episodes: range, processes: int) -> Found:
    """All *episodes*, in turn with each of *subjects*, in so many processes."""

    def work(first: int, pipe: int) -> None:
        found = Found()
        for number in episodes[first::processes]:
            found.add(run_episode(subjects[number % len(subjects)], directory, seed, number))
        with os.fdopen(pipe, "w") as file:
            json.dump(vars(found), file)

    children = [fork(lambda pipe, first=first: work(first, pipe)) for first in range(processes)]  # type: ignore[misc]
    found = Found()
    for child, pipe in children:
        with os.fdopen(pipe) as file:
            text = file.read()
        os.waitpid(child, 0)
        if not text:
            raise KvtierError("a process that damages files ended before its work was done")
        found.add(Found(**json.loads(text)))
    return found


def _subjects(type_name: str, root: Path, given: Sequence[str]) -> list[Subject]:
    """The tier, once in each layout that it has, unless one was given."""
    layout = load_tier_type(type_name).cls.Settings.model_fields.get("layout")
    layouts = () if layout is None else get_args(layout.annotation)
    if not layouts or any(item.startswith("layout=") for item in given):
        return [make_subject(type_name, root, given, maker=_MAKER, **_SMALL)]
    return [make_subject(type_name, root, given, maker=_MAKER, layout=one, **_SMALL) for one in layouts]


def _report(found: Found) -> dict[str, Any]:
    counts = found.counts
    return {
        "corruptions": found.by_way.total(),
        **{name: counts[name] for name in (*_FAILURES, "lost_beyond_damage", "lost_blocks")},
        **{name: counts[name] for name in ("online", "between_starts", "exact_blocks", "unproven_blocks")},
        "lost_beyond_damage_by_file": dict(found.lost_by_file.most_common()),
        "lost_beyond_damage_by_warning": dict(found.lost_by_warning.most_common()),
        "by_way": dict(sorted(found.by_way.items())),
        "by_file": dict(sorted(found.by_file.items())),
        "failures": found.failures[:_MOST_TOLD],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, report; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_testing.corrupt", description=__doc__)
    parser.add_argument("--tier", required=True, metavar="TYPE", help="the tier type, as in a configuration")
    parser.add_argument("--corruptions", type=int, default=500, metavar="N", help="damages (default 500)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the tier"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is random here (default 0)")
    parser.add_argument(
        "--episode", type=int, metavar="N", help="repeat this one alone, and tell what it does"
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="at work at a time (default 2)")
    parser.add_argument("--directory", type=Path, help="where the tier may write (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="kvtier-corrupt-") as name:
            directory = Path(name).resolve()
            subjects = _subjects(given.tier, directory / "root", given.set)
            if given.episode is None:
                episodes = range(-(-given.corruptions // _STEPS))
                found = run(subjects, directory, given.seed, episodes, given.processes)
            else:
                subject = subjects[given.episode % len(subjects)]
                found = run_episode(subject, directory, given.seed, given.episode, tell=True)
    except KvtierError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    report = {"tier": given.tier, "seed": given.seed, **_report(found)}
    text = json.dumps(report) if given.json else os.linesep.join(f"{k:>30}  {v}" for k, v in report.items())
    sys.stdout.write(f"{text}\n")
    return 1 if any(report[name] for name in _FAILURES) else 0


if __name__ == "__main__":
    sys.exit(main())
