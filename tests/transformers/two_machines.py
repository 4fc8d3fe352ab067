"""``kvtier run`` in two directories, each a machine of its own with the same model, that share a store."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.transformers.tiny import save_model, tiny_model

TEXT = "The quick brown fox jumps over the lazy dog. " * 3
RESTORABLE = 128


def run_on_both(place: Path, config: str, hidden: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One prompt, first here and then there, below *place*; the record of each. *hidden* may not be shown."""
    model = save_model(tiny_model(), place / "downloaded")
    records = []
    for name in ("first", "second"):
        directory = place / name
        shutil.copytree(model, directory / "model")
        (directory / "prompts.jsonl").write_text(json.dumps({"prompt": TEXT}) + "\n")
        (directory / "kvtier.toml").write_text(config)
        records.append(_run(directory, hidden))
    return records[0], records[1]


def _run(directory: Path, hidden: str) -> dict[str, Any]:
    """Run the prompt in a process of its own, working in *directory*."""
    command = "kvtier run --model model --prompts prompts.jsonl --config kvtier.toml --max-tokens 5 --json"
    program = "import sys; from kvtier.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()[1:]],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert hidden not in done.stdout + done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record
