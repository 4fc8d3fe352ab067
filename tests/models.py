"""Every architecture, tiny and random, in transformers' engine and in vLLM: served whole, or refused by name.

``python -m tests.models --vllm PYTHON --json`` tries all, in both. ``--page`` writes docs/reference/models.md from the
same run.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from tests.transformers.architectures import REFUSED, SERVED, try_all
from tests.vllm.architectures import MODELS

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"
Found = Mapping[str, Sequence[str]]
"""By the model's name: what became of it (``served``, ``refused`` or ``fault``), and why."""


def count(found: Found) -> dict[str, int]:
    """How many were served, refused, and neither."""
    counts = Counter(outcome for outcome, _ in found.values())
    return {"works": counts["served"], "refused": counts["refused"], "faults": counts["fault"]}


def _rows(found: Found, types: Mapping[str, str], named: Mapping[str, str]) -> str:
    """A table of the models, each with its type and, if it was refused, what the refusal named."""
    return "\n".join(
        f"| {name} | `{types[name]}` | {f'refused: {named[name]}' if outcome == 'refused' else outcome} |"
        for name, (outcome, _) in found.items()
    )


def describe(in_transformers: Found, in_vllm: Found, release: str) -> str:
    """The page about a run that found no fault, with that *release* of vLLM."""
    types = {name: model_type for name, (model_type, _) in SERVED.items()}
    types |= {name: model_type for name, (model_type, _, _) in REFUSED.items()}
    rows = _rows(in_transformers, types, {name: named for name, (_, _, named) in REFUSED.items()})
    in_vllm_rows = _rows(
        in_vllm,
        {name: model.type for name, model in MODELS.items()},
        {name: model.refused for name, model in MODELS.items()},
    )
    served, refused, _ = count(in_transformers).values()
    served_in_vllm, refused_in_vllm, _ = count(in_vllm).values()
    return f"""# Models that were tried

Made by `nox -s models -- --page`, which makes a tiny random model of each row and tries it. A model that is not in the
tables is decided by the same rule: its layers are read when the engine opens.

## In transformers

With transformers {transformers.__version__} {served} of these models are served and {refused} refused.

Each model is compared with transformers' own cache: computed, loaded from the pool, and loaded from disk by another
engine. Served means the same 12 greedy tokens, and first logits within 1e-3. A batch of two prompts, one with padding,
has the same tokens as well.

| model | `model_type` | |
|---|---|---|
{rows}

## In vLLM

With real vLLM {release} on a CPU {served_in_vllm} of these models are served and {refused_in_vllm} refused.

Each model is compared with vLLM without a connector: computed, loaded from the pool, and loaded from disk by another
engine. Served means the same 8 greedy tokens, and hits in both. After a load these are the tokens that vLLM's own
prefix cache gives. vLLM turns that cache off for latent attention on a CPU without AMX, where its kernels round cached
and new tokens differently. To try the copies, the test turns it on.

| model | `model_type` | |
|---|---|---|
{in_vllm_rows}
"""


def main(arguments: list[str] | None = None) -> int:
    """Try all; the exit status says whether there was a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("--vllm", metavar="PYTHON", required=True, help="an interpreter with vLLM")
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}, unless there was a fault")
    given = parser.parse_args(arguments)
    program = [given.vllm, "-m", "tests.vllm.architectures", "--json"]
    in_transformers = try_all()
    in_vllm = json.loads(subprocess.run(program, stdout=subprocess.PIPE, check=False).stdout.splitlines()[-1])
    found: dict[str, Found] = {"transformers": in_transformers, "vllm": in_vllm["found"]}
    faults = {
        f"{name} in {engine}": why
        for engine, models in found.items()
        for name, (outcome, why) in models.items()
        if outcome == "fault"
    }
    report: dict[str, Any] = {engine: count(models) for engine, models in found.items()}
    if given.page and not faults:
        PAGE.write_text(describe(in_transformers, in_vllm["found"], in_vllm["release"]))
    if given.json:
        sys.stdout.write(f"{json.dumps({**report, 'faults': faults})}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
