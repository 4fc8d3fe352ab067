"""Decides whether answers are right. Pure: probabilities in, rows of the report out.

Two runs of one model differ by rounding, more in coarse dtypes. How much is measured: each prompt is computed at once,
and in two pieces, as a restored run computes it. An engine may compute a prompt that was restored whole in a way of its
own (vLLM computes its last token once more), which can't be had without kvtier: so a coarse dtype has a floor beside
what was measured. Wrong KV is looked at as well, since an answer that does not depend on
the restored tokens would show nothing.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtier.certify.document import Document
from kvtier.certify.drivers import Answer

_FLOOR = 1e-3
"""In fp32, rounding stays below this."""
_FLOORS = {"float16": 64 * 2.0**-11, "bfloat16": 64 * 2.0**-8}
"""Of coarser dtypes: 64 times the rounding of one number. SmolLM2 in bf16 differed by 0.19 in vLLM 0.32 on a CPU,
without kvtier, where the last of 32 tokens was computed by itself; longer prompts did not differ at all."""
_TIMES_NOISE = 4.0
NOTHING_RESTORED = "not certified: nothing was restored"
Expected = Literal["something", "nothing", "anything"]
Verdict = Literal["pass", "FAIL", "skipped"]


def difference(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The largest difference of two tokens' log probabilities; infinite where they can't be compared."""
    if one.shape != other.shape:
        return float("inf")
    differ = one != other  # equal infinities do not
    apart = np.abs(one[differ].astype(np.float64) - other[differ])
    return float("inf") if np.isnan(apart).any() else float(apart.max(initial=0.0))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The right answers: those of the engine without kvtier."""

    document: Document
    answers: Mapping[int, NDArray[np.float32]]
    """By the length of the prompt."""
    noise: float
    """How much two right answers differ."""
    dtype: str
    """Of the model."""
    control: float
    """How much answers differ where one block holds the KV of other tokens: the median over the prompts."""

    @property
    def tolerance(self) -> float:
        """Above it, an answer is wrong."""
        return max(_FLOORS.get(self.dtype, _FLOOR), _TIMES_NOISE * self.noise)

    @property
    def can_tell(self) -> bool:
        """Whether wrong KV would be seen."""
        return self.control > self.tolerance


def make_reference(
    document: Document,
    dtype: str,
    at_once: Mapping[int, NDArray[np.float32]],
    in_pieces: Mapping[int, NDArray[np.float32]],
    with_other_block: Mapping[int, NDArray[np.float32]],
) -> Reference:
    """The reference from three ways to compute each prompt, all without kvtier."""
    noise = [difference(at_once[cut], in_pieces[cut]) for cut in in_pieces]
    control = [difference(at_once[cut], with_other_block[cut]) for cut in with_other_block]
    return Reference(
        document=document, dtype=dtype, answers=at_once, noise=max(noise), control=statistics.median(control)
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one scenario. ``difference`` is the largest, after the prompt's token ``at``."""

    scenario: str
    verdict: Verdict
    why: str = ""
    restored: Mapping[str, int] | None = None
    difference: float | None = None
    at: int | None = None
    tolerance: float | None = None

    @property
    def restored_tokens(self) -> int:
        """From all sources."""
        return sum((self.restored or {}).values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"restored_tokens": self.restored_tokens}


def judge(
    scenario: str, reference: Reference, answers: Mapping[int, Answer], expected: Expected = "something"
) -> Row:
    """Compare *answers* by the length of their prompt, in the order in which they were asked.

    For the first one something has to come from before the scenario: later ones may find what it computed.
    """
    document, tolerance = reference.document, reference.tolerance
    apart = {cut: difference(reference.answers[cut], answer) for cut, (answer, _) in answers.items()}
    at = max(apart, key=lambda cut: apart[cut])
    restored: Counter[str] = Counter()
    for _, sources in answers.values():
        restored.update(sources)
    wrong = [cut for cut in sorted(apart) if not apart[cut] <= tolerance]
    if wrong:
        why = _where(document, wrong[0], apart[wrong[0]], answers[wrong[0]][1])
    elif expected == "something" and not sum(next(iter(answers.values()))[1].values()):
        why = NOTHING_RESTORED
    elif expected == "nothing" and restored.total():
        why = f"{restored.total()} tokens were restored that other KV belongs to"
    else:
        why = ""
    return Row(
        scenario=scenario,
        verdict="FAIL" if why else "pass",
        why=why,
        restored=dict(restored),
        difference=apart[at],
        at=at,
        tolerance=tolerance,
    )


def _where(document: Document, cut: int, apart: float, restored: Mapping[str, int]) -> str:
    tokens = sum(restored.values())
    sources = ", ".join(f"{count} from {source}" for source, count in restored.items())
    return (
        f"first wrong after {cut} tokens, by {apart:.3g}: {f'{sources} restored' if tokens else 'nothing restored'}, "
        f"in blocks of {document.tokens_per_block}"
    )


def why_not_certified(rows: Sequence[Row]) -> str | None:
    """What speaks against the engine; ``None`` for one that is certified."""
    failed = [row.scenario for row in rows if row.verdict == "FAIL"]
    if failed:
        return f"not certified: {len(failed)} of {len(rows)} scenarios failed ({', '.join(failed)})"
    if not any(row.restored_tokens for row in rows):
        return NOTHING_RESTORED
    return None
