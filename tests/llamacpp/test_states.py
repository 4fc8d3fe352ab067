"""Models with a state instead of KV (Mamba) or beside it (Jamba): right answers from what was stored, or a miss."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier_core import UnsupportedModelError
from kvtier_core.engine import Namespace, open_session
from kvtier_llamacpp import Engine, Model
from kvtier_llamacpp.canary import Sizes, measure
from kvtier_llamacpp.context import Context
from kvtier_llamacpp.copies import Copies
from tests.llamacpp.conftest import OpenEngine
from tests.llamacpp.own_kv import BLOCK, go_on
from tests.llamacpp.tiny_gguf import VOCAB, write_jamba, write_llama, write_mamba

PROMPT = [(7 * number + number**2) % VOCAB for number in range(1400)]
Write = Callable[[Path], Path]


@pytest.fixture(params=[write_jamba, write_mamba], ids=["jamba", "mamba"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model with a state."""
    write: Write = request.param
    return write(tmp_path / "state.gguf")


def _own(path: Path, pieces: list[list[int]], num_answered: int) -> tuple[list[int], Any]:
    """What llama.cpp alone answers after these pieces, and the logits behind them."""
    logits = np.zeros(0, np.float32)
    with Model(path) as model:
        context = Context(model, num_tokens=1600, tokens_per_block=BLOCK, threads=2, flash_attention=True)
        try:
            for piece in pieces:
                logits = context.decode(piece)
            return go_on(context, logits, num_answered), logits
        finally:
            context.close()


def _ask(engine: Engine, tokens: list[int], num_answered: int = 8, **more: Any) -> Any:
    return engine.generate(tokens, max_tokens=num_answered, ignore_eos=True, **more)


def test_another_engine_goes_on_from_the_state_on_disk_with_the_same_bits(open_engine: OpenEngine, path):
    with open_engine(path, max_tokens=1500) as engine:
        cold = _ask(engine, PROMPT[:1000], 40)
        assert engine.flush()
    own_answer, own = _own(path, [PROMPT[:512], PROMPT[512:992], PROMPT[992:1000]], 40)
    assert np.array_equal(cold.first_logits, own)
    with open_engine(path, max_tokens=1500) as engine:
        again = _ask(engine, PROMPT[:1000], 40)
        assert again.hits_by_tier == {"disk": 992}
        assert again.misses == []
        assert np.array_equal(again.first_logits, own)
        assert list(again.token_ids) == own_answer == list(cold.token_ids)


def test_a_prompt_that_leaves_another_goes_on_from_the_state_before_it_leaves(open_engine: OpenEngine, path):
    other = [*PROMPT[:700], *PROMPT[:100]]
    with open_engine(path, max_tokens=1500) as engine:
        _ask(engine, PROMPT[:1000])
        assert engine.flush()
    answer, own = _own(path, [other[:512], other[512:784], other[784:]], 8)
    with open_engine(path, max_tokens=1500) as engine:
        branched = _ask(engine, other)
        assert branched.hits_by_tier == {"disk": 512}
        assert [miss["from_token"] for miss in branched.misses] == [512]
        assert np.array_equal(branched.first_logits, own)
        assert list(branched.token_ids) == answer


def test_a_conversation_goes_on_from_the_last_block_of_the_answer(open_engine: OpenEngine, path):
    with open_engine(path, max_tokens=1500) as engine:
        first = _ask(engine, PROMPT[:100], 60)
        longer = [*PROMPT[:100], *first.token_ids, *PROMPT[200:230]]
        second = _ask(engine, longer)
        assert second.hit_tokens == 144  # 159 tokens were computed
        alone = _ask(engine, longer, salt="alone")
        assert alone.hit_tokens == 0
        assert alone.token_ids == second.token_ids
        np.testing.assert_allclose(alone.first_logits, second.first_logits, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33, 511, 512, 513, 528, 529])
def test_every_length_is_asked_again_with_the_same_bits(open_engine: OpenEngine, path, num_tokens):
    engine = open_engine(path, max_tokens=1500)
    cold, again = (_ask(engine, PROMPT[:num_tokens]) for _ in range(2))
    assert (cold.hit_tokens, again.hit_tokens) == (0, (num_tokens - 1) // BLOCK * BLOCK)
    assert np.array_equal(cold.first_logits, again.first_logits)
    assert cold.token_ids == again.token_ids


def test_blocks_of_a_size_that_chunks_do_not_end_at(open_engine: OpenEngine, path, config):
    config.write_text(config.read_text().replace("[pool]", "[pool]\nblock_size = 600"))
    engine = open_engine(path, max_tokens=1500)
    cold, again = (_ask(engine, PROMPT) for _ in range(2))
    assert (cold.hit_tokens, again.hit_tokens) == (0, 1200)
    assert np.array_equal(cold.first_logits, again.first_logits)


def test_a_new_process_goes_on_with_the_same_bits(path, config, tmp_path):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPT[:1000]))
    program = (
        "import json, sys; from pathlib import Path; from kvtier_llamacpp import Engine\n"
        "path, config, prompts = map(Path, sys.argv[1:])\n"
        "with Engine.open(path, max_tokens=1500, config=config, threads=2) as engine:\n"
        "    found = engine.generate(json.loads(prompts.read_text()), max_tokens=8, ignore_eos=True)\n"
        "    assert engine.flush()\n"
        "print(json.dumps([dict(found.hits_by_tier), found.token_ids, found.first_logits.tobytes().hex()]))\n"
    )
    command = [sys.executable, "-c", program, str(path), str(config), str(prompts)]
    (none, *cold), (hits, *again) = (
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    assert (none, hits) == ({}, {"disk": 992})
    assert cold == again


# ----------------------------------------------------------------------------------------------------- what goes wrong


def _without_states(offered: Any) -> Any:
    """``Copies.to_store`` as of a pool that has lost the states but the one behind the first 512 tokens."""

    def to_store(self: Copies) -> Any:
        places = offered(self)
        first = 1 if self._has_kv else 0
        return {
            group: ids if group < first else [one if number == 31 else -1 for number, one in enumerate(ids)]
            for group, ids in places.items()
        }

    return to_store


def test_where_states_are_lost_and_blocks_are_kept_the_answer_is_computed_from_the_last_state(
    open_engine: OpenEngine, path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Copies, "to_store", _without_states(Copies.to_store))
        engine = open_engine(path, max_tokens=1500)
        cold, again = (_ask(engine, PROMPT[:1000]) for _ in range(2))
    assert (cold.hit_tokens, again.hit_tokens) == (0, 512)
    assert np.array_equal(cold.first_logits, again.first_logits)
    short = _ask(engine, PROMPT[:400])
    assert short.hit_tokens == 0


def test_damaged_files_cost_hits_and_no_bit(open_engine: OpenEngine, path, tmp_path):
    with open_engine(path, max_tokens=1500) as engine:
        cold = _ask(engine, PROMPT[:1000])
        assert engine.flush()
    files = [file for file in (tmp_path / "root").rglob("*") if file.is_file() and file.stat().st_size > 4096]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        data[1000::4096] = bytes(byte ^ 1 for byte in data[1000::4096])
        file.write_bytes(data)
    with open_engine(path, max_tokens=1500) as engine:
        again = _ask(engine, PROMPT[:1000])
    assert again.hit_tokens == 0
    assert again.token_ids == cold.token_ids
    assert np.array_equal(again.first_logits, cold.first_logits)


def test_a_tier_whose_files_are_gone_costs_hits_and_no_bit(open_engine: OpenEngine, path, tmp_path):
    with open_engine(path, max_tokens=1500) as engine:
        cold = _ask(engine, PROMPT[:1000])
        assert engine.flush()
    with open_engine(path, max_tokens=1500) as engine:
        for file in (tmp_path / "root").rglob("*"):
            if file.is_file():
                file.unlink()
        again = _ask(engine, PROMPT[:1000])
    assert again.token_ids == cold.token_ids
    assert np.array_equal(again.first_logits, cold.first_logits)


def test_a_state_that_llamacpp_does_not_take_in_costs_hits_and_no_bit(
    open_engine: OpenEngine, path, monkeypatch, caplog
):
    engine = open_engine(path, max_tokens=1500)
    cold = _ask(engine, PROMPT[:100])
    write = Context._write

    def refuse_states(self: Context, sequence: int, what: int, data: Any) -> bool:
        return write(self, sequence, what, data) and sequence != 0

    with monkeypatch.context() as patch:
        patch.setattr(Context, "_write", refuse_states)
        refused = _ask(engine, PROMPT[:100])
    assert refused.hit_tokens == 0
    assert np.array_equal(refused.first_logits, cold.first_logits)
    assert "computed from its beginning" in caplog.text
    assert _ask(engine, PROMPT[:100]).hit_tokens == 96


def test_a_pool_of_few_rows_gives_right_answers(open_engine: OpenEngine, path, config):
    config.write_text(config.read_text().replace("128MiB", "96KiB"))
    engine = open_engine(path, max_tokens=1500)
    cold, again = (_ask(engine, PROMPT[:1000]) for _ in range(2))
    assert np.array_equal(cold.first_logits, again.first_logits)
    assert cold.token_ids == again.token_ids


# ------------------------------------------------------------------------------------------------- what is kept of what


@pytest.mark.parametrize("damage", ["another state", "a state that is too large"])
def test_c05_an_adapter_that_misreads_a_state_is_refused_at_the_start(
    open_engine: OpenEngine, path, monkeypatch, damage
):
    read_state, measure_state = Context.read_state, Context.measure_state
    if damage == "another state":

        def misread(self: Context, into: Any) -> bool:
            has_read = read_state(self, into)
            into[-4:] = 0
            return has_read

        monkeypatch.setattr(Context, "read_state", misread)
    else:  # as of a window that is written down with the state, and grows
        monkeypatch.setattr(Context, "measure_state", lambda self: measure_state(self) - 16)
    with pytest.raises(UnsupportedModelError, match="or the state behind them"):
        open_engine(path)


def test_the_namespace_tells_what_a_model_keeps(open_engine: OpenEngine, tmp_path, monkeypatch):
    described: dict[str, Namespace] = {}

    def remember(settings: Any, namespace: Namespace, layout: Any) -> Any:
        described[namespace.model] = namespace
        return open_session(settings, namespace, layout)

    monkeypatch.setattr("kvtier_llamacpp.keeper.open_session", remember)
    for name, write in {"llama": write_llama, "jamba": write_jamba, "mamba": write_mamba}.items():
        open_engine(write(tmp_path / f"{name}.gguf"))
    windows = {name: [group.window for group in namespace.groups] for name, namespace in described.items()}
    assert windows == {"llama": [None], "jamba": [None, 1, 1, 1], "mamba": [1]}
    blocks, *parts = described["jamba"].groups
    assert len({part.layers for part in parts}) == 3
    assert all(part.block_bytes <= blocks.block_bytes for part in parts)


def test_a_state_far_larger_than_a_block_takes_few_rows(tmp_path):
    with Model(write_jamba(tmp_path / "jamba.gguf")) as model:
        context = Context(model, num_tokens=64, tokens_per_block=BLOCK, threads=2, flash_attention=True)
        try:
            sizes = measure(context)
            groups = Copies(context, 4, Sizes(sizes.block, 1000 * sizes.block + 1)).groups
        finally:
            context.close()
    assert len(groups) == 17
    assert sum(group.block_bytes for group in groups[1:]) >= 1000 * sizes.block + 1


def test_the_bytes_of_a_state_and_of_blocks_do_not_depend_on_what_was_computed_before(path):
    with Model(path) as model:
        context = Context(model, num_tokens=512, tokens_per_block=BLOCK, threads=2, flash_attention=True)
        try:
            sizes = measure(context)
            seen = []
            for before in ([], PROMPT[500:537]):
                if before:
                    context.decode(before)
                    context.clear()
                context.decode(PROMPT[:64])
                state, block = np.zeros(sizes.state, np.uint8), np.zeros(sizes.block, np.uint8)
                assert context.read_state(state)
                assert not sizes.block or context.read_block(2, block)
                seen.append((state.tobytes(), block.tobytes()))
                context.clear()
        finally:
            context.close()
    assert seen[0] == seen[1]
