"""The demo's result: numbers, verdict and table, out of the workers' answers.

Decides what counts as identical: every leg gives each question the same tokens as the run without kvtier, and
first-token logits within ``LOGIT_TOLERANCE``. Times are to the first token, process start and model load left out;
where a leg answered several questions the median stands for it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier_core.engine import format_size
from kvtier_transformers.demo.legs import Answer, Leg, OverheadPair
from kvtier_transformers.demo.manual import QUESTIONS

LOGIT_TOLERANCE = 1e-3
"""Largest difference of a first-token logit: KV computed in chunks of other lengths differs in its last bits."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What ``kvtier demo --json`` prints. Times in seconds, sizes in bytes, rates in 10^9 bytes a second."""

    identical: bool
    max_logit_diff: float
    tokens: int
    questions: int
    answer_tokens: int
    ttft_cold_s: float
    ttft_cold_tiers_s: float
    ttft_pool_s: float
    ttft_disk_s: float
    speedup_pool: float
    speedup_disk: float
    restored_tokens_pool: int
    restored_tokens_disk: int
    bytes_restored_pool: int
    bytes_restored_disk: int
    gb_per_s_pool: float
    gb_per_s_disk: float
    integrity_misses: int
    corrupted_files: int
    store_overhead_cpu: float | None
    """CPU time of a cold run with empty tiers over one without kvtier, the prompt in the same pieces: median of pairs.

    None when not measured.
    """
    disk_read_vs_raw: float | None
    """``None`` when not all blocks were there to be read."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One leg in numbers."""

    ttft_s: float
    restored_tokens: int
    restored_bytes: int
    gb_per_s: float


def _row(answers: Sequence[Answer], source: str | None, bytes_per_token: int) -> _Row:
    # restored tokens: of the question that got fewest, so that no good one hides a bad one
    restored = min(answer.hits_by_tier.get(source, 0) for answer in answers) if source else 0
    rates = [
        answer.hits_by_tier.get(source, 0) * bytes_per_token / answer.load_s / 1e9
        for answer in answers
        if source and answer.load_s > 0
    ]
    return _Row(
        ttft_s=median(answer.ttft_s for answer in answers),
        restored_tokens=restored,
        restored_bytes=restored * bytes_per_token,
        gb_per_s=median(rates) if rates else 0.0,
    )


class Results:
    """All answers of one demo run, by leg."""

    def __init__(
        self, answers: Sequence[Answer], *, prefix_tokens: int, bytes_per_token: int, disk_tier: str
    ) -> None:
        self._answers = answers
        self._prefix_tokens = prefix_tokens
        sources = {Leg.PLAIN: None, Leg.COLD_TIERS: None, Leg.POOL: "pool", Leg.DISK: disk_tier}
        self._rows = {
            leg: _row([answer for answer in answers if answer.leg is leg], source, bytes_per_token)
            for leg, source in sources.items()
        }
        self._plain = {answer.question: answer for answer in answers if answer.leg is Leg.PLAIN}

    def _same_tokens(self, leg: Leg) -> bool:
        return all(
            answer.token_ids == self._plain[answer.question].token_ids
            for answer in self._answers
            if answer.leg is leg
        )

    def summary(
        self,
        *,
        max_logit_diff: float,
        integrity_misses: int,
        corrupted_files: int,
        pairs: Sequence[OverheadPair] = (),
        disk_read_vs_raw: float | None = None,
    ) -> Summary:
        """The numbers. *max_logit_diff* is over all answers, against those without kvtier."""
        overheads = [pair.tiers_cpu_s / pair.plain_cpu_s for pair in pairs]
        rows = self._rows
        cold = rows[Leg.PLAIN].ttft_s
        return Summary(
            identical=max_logit_diff <= LOGIT_TOLERANCE and all(map(self._same_tokens, Leg)),
            max_logit_diff=max_logit_diff,
            tokens=self._prefix_tokens,
            questions=len(self._plain),
            answer_tokens=len(self._plain[0].token_ids),
            ttft_cold_s=cold,
            ttft_cold_tiers_s=rows[Leg.COLD_TIERS].ttft_s,
            ttft_pool_s=rows[Leg.POOL].ttft_s,
            ttft_disk_s=rows[Leg.DISK].ttft_s,
            speedup_pool=cold / rows[Leg.POOL].ttft_s,
            speedup_disk=cold / rows[Leg.DISK].ttft_s,
            restored_tokens_pool=rows[Leg.POOL].restored_tokens,
            restored_tokens_disk=rows[Leg.DISK].restored_tokens,
            bytes_restored_pool=rows[Leg.POOL].restored_bytes,
            bytes_restored_disk=rows[Leg.DISK].restored_bytes,
            gb_per_s_pool=rows[Leg.POOL].gb_per_s,
            gb_per_s_disk=rows[Leg.DISK].gb_per_s,
            integrity_misses=integrity_misses,
            corrupted_files=corrupted_files,
            store_overhead_cpu=median(overheads) if overheads else None,
            disk_read_vs_raw=disk_read_vs_raw,
        )

    def render(self, summary: Summary) -> RenderableType:
        """The table for a person, with the answers below it."""
        table = Table(title=f"{summary.tokens} tokens of manual, then a question", title_justify="left")
        table.add_column("")
        for heading in ("first token", "speed-up", "tokens restored", "bytes", "GB/s", "same answers"):
            table.add_column(heading, justify="right")
        for leg, row in self._rows.items():
            restored = row.restored_tokens > 0
            table.add_row(
                leg.heading,
                f"{row.ttft_s:.2f} s",
                f"{summary.ttft_cold_s / row.ttft_s:.1f} x",
                str(row.restored_tokens) if restored else "-",
                format_size(row.restored_bytes) if restored else "-",
                f"{row.gb_per_s:.2f}" if restored else "-",
                "-" if leg is Leg.PLAIN else "yes" if self._same_tokens(leg) else "NO",
            )
        lines = [
            f"Q: {QUESTIONS[question]}\nA: {' '.join(answer.text.split())}..."
            for question, answer in sorted(self._plain.items())
        ]
        lines.append(
            f"Times to the first token are medians over {summary.questions} questions (tiers empty: the first one), "
            "process start and model load left out; tokens restored are those of the question that got fewest."
        )
        if summary.disk_read_vs_raw is not None:
            lines.append(
                f"Reading the text's blocks took the disk tier {summary.disk_read_vs_raw:.2f} times as long as reading "
                "as many bytes of its files without it."
            )
        if summary.corrupted_files:
            lines.append(
                f"Damaged {summary.corrupted_files} stored files: {summary.integrity_misses} blocks were refused and "
                "computed anew."
            )
        if summary.store_overhead_cpu is not None:
            lines.append(
                f"CPU time of a cold run with empty tiers: {summary.store_overhead_cpu:.3f} times that without kvtier."
            )
        verdict = "identical" if summary.identical else "NOT IDENTICAL"
        lines.append(
            f"All answers {verdict} to those without a cache: {summary.answer_tokens} tokens each; largest difference "
            f"of a first-token logit {summary.max_logit_diff:.1e} (limit {LOGIT_TOLERANCE:g})."
        )
        return Group(table, Text("\n".join(lines)))
