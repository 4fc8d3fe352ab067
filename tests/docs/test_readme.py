"""The README's code runs: what stands behind a ``<!-- test: name -->`` mark is used as a reader would use it."""

import json
import re
from pathlib import Path

import pytest

from kvtier.main import main
from tests.transformers.tiny import save_model, tiny_model

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"<!-- test: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)


def blocks() -> dict[str, str]:
    return dict(_BLOCK.findall((ROOT / "README.md").read_text()))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as the README leaves it: the two files, and a small model."""
    monkeypatch.chdir(tmp_path)
    for name in ("kvtier.toml", "prompts.jsonl"):
        (tmp_path / name).write_text(blocks()[name])
    save_model(tiny_model(), tmp_path / "DIR_OR_GGUF")
    return tmp_path


def test_every_marked_block_is_used():
    assert set(blocks()) == {"kvtier.toml", "prompts.jsonl", "python", "tier"}


def test_kvtier_run_with_the_readmes_files_twice(workplace, capsys):
    command = [
        "run",
        "--model",
        "DIR_OR_GGUF",
        "--prompts",
        "prompts.jsonl",
        "--config",
        "kvtier.toml",
        "--json",
    ]
    runs = []
    for _ in range(2):
        assert main(command) == 0
        runs.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    # All three share a text, the third not the salt; in the second run each finds what the first run stored.
    first, second, salted = (record["hits_by_tier"] for record in runs[0])
    assert first == salted == {}
    assert second["pool"] > 100
    assert all(record["hits_by_tier"].get("disk", 0) > 0 for record in runs[1])
    assert [record["text"] for record in runs[0]] == [record["text"] for record in runs[1]]


def test_the_python_example(workplace, capsys):
    exec(compile(blocks()["python"], "README.md", "exec"), {})  # our own README
    assert capsys.readouterr().out.endswith("\n{} [{'from_token': 0, 'group': 0, 'reason': 'not_stored'}]\n")


def test_the_tier_example_is_found_by_its_entry_point_and_holds_blocks(workplace, site, capsys):
    entry_points = {"kvtier.tiers.v1": {"dict": "my_package:DictTier"}}
    site.install("my-package", entry_points, {"my_package": blocks()["tier"]})
    config = workplace / "dict.toml"
    config.write_text('[pool]\ncapacity = "64MiB"\n\n[tiers.mine]\ntype = "dict"\n')
    (workplace / "one.jsonl").write_text(json.dumps({"prompt": "a" * 100, "max_tokens": 2}) + "\n")
    assert (
        main(["run", "--model", "DIR_OR_GGUF", "--prompts", "one.jsonl", "--config", str(config), "--json"])
        == 0
    )
    assert main(["list"]) == 0
    assert "my-package" in capsys.readouterr().out
