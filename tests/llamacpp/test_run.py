"""``kvtier run --engine llama.cpp`` in two processes."""

import json
import subprocess
import sys

import pytest

from kvtier.engines import Model
from kvtier_llamacpp.local_model import LocalModel
from tests.llamacpp.tiny_gguf import write_jamba

OFFERED: type[Model] = LocalModel
"""Whether it is one is the type checker's to say."""
TEXT = "The manual says: fill the tank with cold water, close the lid, press the red button twice. " * 4


def _run(model, config, prompts):
    command = ("run", "--engine", "llama.cpp", "--model", model, "--config", config, "--prompts", prompts)
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.main", *command, "--max-tokens", "8", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
def test_a_second_process_restores_what_the_first_one_stored(model, config, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": TEXT + "So fill"}, {"prompt": TEXT + "So press", "max_tokens": 3, "salt": "a"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = (_run(model, config, prompts) for _ in range(2))
    assert [record["hits_by_tier"] for record in first] == [{}, {}]
    assert [list(record["hits_by_tier"]) for record in second] == [["disk"], ["disk"]]
    assert all(record["hit_tokens"] > record["prompt_tokens"] - 17 for record in second)
    assert [record["text"] for record in first] == [record["text"] for record in second]
    assert [len(record["token_ids"]) for record in second] == [8, 3]


def test_a_model_with_a_state_goes_on_from_it_in_a_second_process(config, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": TEXT}) + "\n")
    model = write_jamba(tmp_path / "jamba.gguf", has_text=True)
    [first], [second] = (_run(model, config, prompts) for _ in range(2))
    assert first["hits_by_tier"] == {}
    assert second["hits_by_tier"] == {"disk": (second["prompt_tokens"] - 1) // 16 * 16}
    assert first["token_ids"] == second["token_ids"]


def test_a_prompt_that_the_model_can_not_hold_is_named(model, config, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "water " * 9000}) + "\n")
    command = ("run", "--engine", "llama.cpp", "--model", model, "--config", config, "--prompts", prompts)
    done = subprocess.run(
        [sys.executable, "-m", "kvtier.main", *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "prompts.jsonl, line 1: " in done.stderr
    assert "exceed the model's context of 8192" in done.stderr
