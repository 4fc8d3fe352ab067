"""Runs the demo's processes one after another and keeps a progress bar meanwhile.

Decides the configuration the demo runs with and which process does what. Computes nothing itself and imports no torch.
"""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtier_core import Settings, load_settings
from kvtier_transformers.demo.files import drop_page_cache, flip_bytes
from kvtier_transformers.demo.legs import Answer, Leg, Order, OverheadPair, WorkerReport
from kvtier_transformers.demo.manual import QUESTIONS
from kvtier_transformers.demo.process import run_worker
from kvtier_transformers.demo.summary import Results, Summary

DISK_TIER = "disk"
ANSWER_TOKENS = 32
_QUESTIONS = tuple(range(len(QUESTIONS)))
_WEIGHTS = {Leg.PLAIN: 4.0, Leg.COLD_TIERS: 4.0, Leg.POOL: 1.0, Leg.DISK: 2.0}
"""How long a question takes on each leg, roughly, for the progress bar."""
_CONFIGURATION = """\
[pool]
capacity = "1GiB"

[tiers.{tier}]
type = "disk"
root = {root}
capacity = "2GiB"
"""


class Show:
    """One run of the demo in *directory*, told on *console*."""

    def __init__(
        self,
        directory: Path,
        console: Console,
        *,
        prefix_tokens: int,
        corrupt: bool,
        threads: int | None,
        overhead_pairs: int,
    ) -> None:
        self._directory = directory
        self._console = console
        self._prefix_tokens = prefix_tokens
        self._corrupt = corrupt
        self._threads = threads
        self._overhead_pairs = overhead_pairs
        self._pairs: list[OverheadPair] = []
        self._answers: list[Answer] = []
        self._reports: list[WorkerReport] = []
        self._data = directory / "tier"

    def run(self) -> tuple[Results, Summary]:
        """Answer every question on every leg.

        Raises ``ConfigError`` when the model, ``PluginError`` when the disk tier is not installed.
        """
        self._write_settings()
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        ) as bar:
            self._bar = _Bar(bar)
            self._work((Leg.PLAIN, Leg.COLD_TIERS, Leg.POOL), _QUESTIONS)
            corrupted = 0
            if self._corrupt:
                shared = self._prefix_tokens * self._reports[0].bytes_per_token
                corrupted = len(flip_bytes(self._data, shared))
            for question in _QUESTIONS:
                drop_page_cache(self._data)
                self._work((Leg.DISK,), (question,))
            if self._overhead_pairs:
                self._work((), (), self._overhead_pairs)
        compared = [
            report.disk_read_vs_raw for report in self._reports if report.disk_read_vs_raw is not None
        ]
        results = Results(
            self._answers,
            prefix_tokens=self._prefix_tokens,
            bytes_per_token=self._reports[0].bytes_per_token,
            disk_tier=DISK_TIER,
        )
        return results, results.summary(
            max_logit_diff=self._max_logit_diff(),
            integrity_misses=sum(report.integrity_misses for report in self._reports),
            corrupted_files=corrupted,
            pairs=self._pairs,
            disk_read_vs_raw=compared[-1] if compared else None,
        )

    def _write_settings(self) -> Settings:
        file = self._directory / "kvtier.toml"
        # a JSON string is a TOML string
        file.write_text(_CONFIGURATION.format(tier=DISK_TIER, root=json.dumps(str(self._data))))
        return load_settings(file=file, environ={})

    def _work(self, legs: tuple[Leg, ...], questions: tuple[int, ...], overhead_pairs: int = 0) -> None:
        order = Order(
            legs=legs,
            questions=questions,
            directory=str(self._directory),
            prefix_tokens=self._prefix_tokens,
            answer_tokens=ANSWER_TOKENS,
            threads=self._threads,
            overhead_pairs=overhead_pairs,
        )
        self._bar.say("loading the model")
        # closing: whatever ends this loop ends the worker before its directory is removed
        with closing(run_worker(order)) as events:
            for event in events:
                self._take(event.pop("event"), event)

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        """One event of a worker."""
        match kind:
            case "started":
                self._bar.say(f"{Leg(data['leg']).heading}, question {data['question'] + 1}")
            case "tokens":
                self._bar.part(_WEIGHTS[Leg.PLAIN] * data["tokens"] / self._prefix_tokens)
            case "answer":
                answer = Answer.from_json(data)
                self._answers.append(answer)
                self._bar.done(_WEIGHTS[answer.leg])
            case "pair":
                self._pairs.append(OverheadPair.from_json(data))
                self._bar.say(f"CPU time with and without, pair {len(self._pairs)} of {self._overhead_pairs}")
            case "report":
                self._reports.append(WorkerReport.from_json(data))

    def _max_logit_diff(self) -> float:
        plain = {answer.question: self._logits(answer) for answer in self._answers if answer.leg is Leg.PLAIN}
        return max(
            float(np.abs(self._logits(answer) - plain[answer.question]).max()) for answer in self._answers
        )

    def _logits(self, answer: Answer) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = np.load(self._directory / answer.logits_file)
        return logits


class _Bar:
    """One progress bar over all legs; where no terminal shows it, a line for each thing told."""

    def __init__(self, progress: Progress) -> None:
        plain_pool_disk = _WEIGHTS[Leg.PLAIN] + _WEIGHTS[Leg.POOL] + _WEIGHTS[Leg.DISK]
        self._progress = progress
        self._task = progress.add_task("", total=len(_QUESTIONS) * plain_pool_disk + _WEIGHTS[Leg.COLD_TIERS])
        self._finished = 0.0

    def say(self, what: str) -> None:
        self._progress.update(self._task, description=what)
        if not self._progress.console.is_interactive:
            self._progress.console.print(what)

    def part(self, of_a_question: float) -> None:
        self._progress.update(self._task, completed=self._finished + of_a_question)

    def done(self, question: float) -> None:
        self._finished += question
        self._progress.update(self._task, completed=self._finished)
