"""The Python of kvtier-transformers' page runs, block after block, as a reader would use it."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier_transformers import Engine, load
from tests.transformers.tiny import BLOCK, byte_tokenizer, save_model, tiny_model, tokens

PAGE = Path(__file__).parents[2] / "plugins/kvtier-transformers/README.md"
ENGINE, ONE_PROMPT, BATCH, HINTS = range(4)
"""The page's blocks of Python."""


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """What a reader has when the Python begins, and ``run``, which runs one of the blocks with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTIER_POOL__CAPACITY", "8MiB")
    (config,) = blocks("toml")
    Path("kvtier.toml").write_text(config.replace("/var/cache/kvtier", str(tmp_path / "blocks")))
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    text = "Tiers keep what was computed once. " * 3
    names = {
        "model": load(save_model(tiny_model(), tmp_path / "model")).model,
        "tokenizer": tokenizer,
        "text": text,
        "texts": [f"{text}And why?", f"{text}How long does a block stay?"],
        "input_ids": torch.tensor([tokens(100)]),
        "prompt_ids": tokens(60, seed=1),
    }

    def run(number):
        exec(compile(blocks("python")[number], "README.md", "exec"), names)  # our own page

    return SimpleNamespace(names=names, run=run)


@pytest.fixture
def with_engine(reader):
    """The same, with an engine."""
    with Engine.open(reader.names["model"], max_tokens=512, config=Path("kvtier.toml")) as engine:
        reader.names["engine"] = engine
        yield reader


def test_every_block_is_run_here():
    assert len(blocks("python")) == len((ENGINE, ONE_PROMPT, BATCH, HINTS))


def test_i17_the_engine_completes_and_finds_the_text_again(reader):
    for source in (set(), {"disk"}):
        reader.run(ENGINE)
        assert set(reader.names["generation"].hits_by_tier) == source


@pytest.mark.filterwarnings(
    "ignore:.past_key_values. is deprecated:FutureWarning"
)  # before 5.24 it has no other name
@pytest.mark.parametrize("number", [ONE_PROMPT, BATCH], ids=["a prompt", "a batch"])
def test_i17_your_own_call_of_the_model_finds_the_prompt_again(with_engine, number):
    outputs = []
    for has_stored in (False, True):
        with_engine.run(number)
        assert (with_engine.names["prompt"].hit_tokens >= 5 * BLOCK) == has_stored
        outputs.append(with_engine.names["output"].tolist())
    assert outputs[0] == outputs[1]


def test_i17_hints_are_counted(with_engine):
    with_engine.run(HINTS)
    counted = with_engine.names["engine"].stats()["hints"]
    assert (counted["pin"], counted["prefetch"]) == (1, 1)
