"""A real llama.cpp answers from restored KV as from its own, whatever happens to the tiers."""

import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier_core import ClosedError, ConfigError, PluginError, UnsupportedModelError
from kvtier_llamacpp import Engine, LlamaError, binding
from kvtier_llamacpp.canary import Sizes, measure
from kvtier_llamacpp.context import Context
from tests.llamacpp.conftest import OpenEngine
from tests.llamacpp.own_kv import BLOCK, answer_from_own_kv
from tests.llamacpp.prompts import manual

ANSWER = 8


def _ask_in_a_new_process(
    model: Path, config: Path, num_tokens: int, logits: Path
) -> tuple[dict[str, Any], Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.llamacpp.ask_program", model, config, str(num_tokens), logits],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), np.load(logits)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_tokens", [1024, 4096])
def test_a_new_process_restores_from_disk_and_its_logits_are_bit_identical(
    model, config, tmp_path, num_tokens
):
    own_answer, own = answer_from_own_kv(
        model, lambda loaded: manual(loaded, num_tokens), num_tokens - BLOCK, ANSWER
    )
    cold, _ = _ask_in_a_new_process(model, config, num_tokens, tmp_path / "cold.npy")
    again, restored = _ask_in_a_new_process(model, config, num_tokens, tmp_path / "again.npy")
    assert cold["hits"] == {}
    assert again["hits"] == {"disk": num_tokens - BLOCK}
    assert again["token_ids"] == own_answer
    assert np.array_equal(restored, own)


def test_blocks_of_the_answer_are_kept_too(open_engine: OpenEngine):
    engine = open_engine()
    prompt = manual(engine, 40)
    first = engine.generate(prompt, max_tokens=24, ignore_eos=True)
    longer = [*prompt, *first.token_ids]
    second = engine.generate([*longer, *prompt], max_tokens=1)
    assert (
        second.hit_tokens == (len(longer) - 1) // BLOCK * BLOCK
    )  # the answer's last token was never computed
    assert second.hits_by_tier == {"pool": second.hit_tokens}


def test_requests_of_other_salts_share_nothing(open_engine: OpenEngine):
    engine = open_engine()
    prompt = manual(engine, 100)
    answers = [engine.generate(prompt, max_tokens=4, salt=salt) for salt in ("a", "b", "a")]
    assert [answer.hit_tokens for answer in answers] == [0, 0, 96]


def test_damaged_files_cost_hits_and_no_token(open_engine: OpenEngine, tmp_path):
    with open_engine() as engine:
        prompt = manual(engine, 200)
        cold = engine.generate(prompt, max_tokens=8)
        assert engine.flush()
    for file in (tmp_path / "root").rglob("*"):
        if file.is_file() and file.stat().st_size >= 1 << 20:
            data = bytearray(file.read_bytes())
            data[5000::9973] = bytes(byte ^ 1 for byte in data[5000::9973])
            file.write_bytes(data)
    with open_engine() as engine:
        again = engine.generate(prompt, max_tokens=8)
    assert again.token_ids == cold.token_ids
    assert again.hit_tokens == 0


def test_a_block_that_llamacpp_does_not_take_in_costs_hits_and_no_token(
    open_engine: OpenEngine, monkeypatch, caplog
):
    engine = open_engine()
    prompt = manual(engine, 100)
    cold = engine.generate(prompt, max_tokens=4)
    write_block = Context.write_block
    taken = iter([True, True, False])

    def refuse_the_third(self: Context, index: int, block: Any) -> bool:
        return next(taken) and write_block(self, index, block)

    with monkeypatch.context() as patch:
        patch.setattr(Context, "write_block", refuse_the_third)
        refused = engine.generate(prompt, max_tokens=4)
    assert refused.token_ids == cold.token_ids
    assert np.array_equal(refused.first_logits, cold.first_logits)
    assert (refused.hit_tokens, refused.hits_by_tier) == (0, {})
    assert "computed from its beginning" in caplog.text
    assert engine.generate(prompt, max_tokens=4).hit_tokens == 96


def test_another_file_or_another_build_finds_nothing(open_engine: OpenEngine, model, tmp_path, monkeypatch):
    with open_engine() as engine:
        prompt = manual(engine, 64)
        engine.generate(prompt, max_tokens=1)
        assert engine.flush()
    changed = bytearray(model.read_bytes())
    changed[-100] ^= 1  # a weight
    other = tmp_path / model.name
    other.write_bytes(changed)
    with open_engine(other) as engine:
        assert engine.generate(prompt, max_tokens=1).hit_tokens == 0
    with open_engine(flash_attention=False) as engine:
        assert engine.generate(prompt, max_tokens=1).hit_tokens == 0
    with monkeypatch.context() as patch:
        patch.setattr("kvtier_llamacpp.engine.build", lambda: "xllamacpp-2026.11")
        with open_engine() as engine:
            assert engine.generate(prompt, max_tokens=1).hit_tokens == 0
    with open_engine() as engine:
        assert engine.generate(prompt, max_tokens=1).hit_tokens == 48


# ----------------------------------------------------------------------------------------------------- what is refused


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    open_engine: OpenEngine, model, tmp_path, monkeypatch
):
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    path.write_bytes(model.read_bytes())
    other.write_bytes(model.read_bytes())

    def replace_and_measure(context: Context) -> Sizes:
        other.replace(path)
        return measure(context)

    with monkeypatch.context() as patch:
        patch.setattr("kvtier_llamacpp.keeper.measure", replace_and_measure)
        with pytest.raises(LlamaError, match="the file changed while it was opened"):
            open_engine(path)
    assert open_engine(path).vocab_size == 49152


def test_a_file_that_is_overwritten_or_cut_while_it_is_served_changes_no_answer(
    open_engine: OpenEngine, model, tmp_path
):
    own = tmp_path / "own.gguf"
    own.write_bytes(model.read_bytes())
    engine = open_engine(own)
    prompt = manual(engine, 100)
    before = engine.generate(prompt, max_tokens=ANSWER)
    half = own.stat().st_size // 2
    with own.open("r+b") as file:
        file.seek(half)
        file.write(bytes(half))
    after = engine.generate(prompt, max_tokens=ANSWER, salt="computed again")
    assert np.array_equal(before.first_logits, after.first_logits)
    assert before.token_ids == after.token_ids
    os.truncate(own, 0)
    assert engine.generate(prompt, max_tokens=ANSWER, salt="once more").token_ids == before.token_ids


def test_other_threads_are_another_namespace(open_engine: OpenEngine):
    with open_engine() as engine:
        prompt = manual(engine, 64)
        engine.generate(prompt, max_tokens=1)
        assert engine.flush()
    with open_engine(threads=1) as engine:
        assert engine.generate(prompt, max_tokens=1).hit_tokens == 0


@pytest.mark.parametrize("damage", ["keys and values", "two tokens"])
def test_c05_an_adapter_that_misreads_a_block_is_refused_at_the_start(
    open_engine: OpenEngine, monkeypatch, damage
):
    write_block = Context.write_block

    def misread(self: Context, index: int, block: Any) -> bool:
        changed = block.copy()
        row = 192 * 2  # bytes of a token's K in one layer: 3 heads of 64 in float16
        middle = len(changed) // 2
        first = slice(middle, middle + row)
        other = (
            slice(middle - 16 * row - 12, middle - 16 * row - 12 + row)
            if damage == "keys and values"
            else slice(middle + row, middle + 2 * row)
        )
        changed[first], changed[other] = block[other].copy(), block[first].copy()
        return write_block(self, index, changed)

    monkeypatch.setattr(Context, "write_block", misread)
    with pytest.raises(UnsupportedModelError, match="are not what it had computed"):
        open_engine()


def test_what_is_no_model_is_refused_with_its_path(open_engine: OpenEngine, tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"none\.gguf: no such file"):
        open_engine(tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"broken\.gguf: llama\.cpp can't load it"):
        open_engine(broken)
    assert "llama.cpp: " in caplog.text
    with pytest.raises(ConfigError, match="max_tokens=0"):
        open_engine(max_tokens=0)


def test_a_missing_part_of_several_is_named(open_engine: OpenEngine, model, tmp_path):
    first = tmp_path / "big-00001-of-00002.gguf"
    first.symlink_to(model)
    with pytest.raises(ConfigError, match=r"big-00002-of-00002\.gguf: no such file"):
        open_engine(first)
    for name in ("big-00001-of-00000.gguf", "big-00002-of-00003.gguf", "big-00000-of-00003.gguf"):
        other = tmp_path / name
        other.symlink_to(model)
        with pytest.raises(ConfigError, match="give the first part"):
            open_engine(other)


def test_prompts_that_can_not_be_run_are_refused_and_the_next_one_is_served(open_engine: OpenEngine):
    engine = open_engine()
    refused: list[tuple[Any, int, str]] = [
        ([], 1, "a prompt of 0 tokens"),
        ([1], 0, "max_tokens=0"),
        ([1] * 250, 8, "open it with a larger max_tokens"),
        ([1, 49152], 1, "no token 49152"),
        ([-1], 1, "no token -1"),
        ([1.5], 1, "whole numbers"),
        ([2**40], 1, "no token 1099511627776"),
    ]
    for prompt, count, problem in refused:
        with pytest.raises(LlamaError, match=problem):
            engine.generate(prompt, max_tokens=count)
    for tokens in ([49152], [-5], [2**40]):
        with pytest.raises(LlamaError, match="no token"):
            engine.detokenize(tokens)
    with pytest.raises(LlamaError, match="half a surrogate pair at character 2"):
        engine.tokenize("a\ud800")
    assert engine.generate(np.arange(1, 250), max_tokens=8, ignore_eos=True).prompt_tokens == 249


def test_one_prompt_at_a_time(open_engine: OpenEngine):
    engine = open_engine()
    refused: list[BaseException] = []

    def ask_from_another_thread(_: int) -> None:
        def ask() -> None:
            try:
                engine.generate([1], max_tokens=1)
            except LlamaError as error:
                refused.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    engine.generate([1, 2, 3], max_tokens=1, on_token=ask_from_another_thread)
    assert "busy with another prompt" in str(refused[0])
    engine.close()
    engine.close()
    for use in (
        lambda: engine.generate([1], max_tokens=1),
        lambda: engine.detokenize([1]),
        lambda: engine.tokenize("a"),
    ):
        with pytest.raises(ClosedError):
            use()


def test_on_token_ends_the_answer_where_it_wants_and_all_of_it_is_kept(open_engine: OpenEngine):
    engine = open_engine()
    prompt = manual(engine, 40)
    whole = engine.generate(prompt, max_tokens=24, ignore_eos=True)
    seen: list[int] = []

    def end_at_the_tenth(token_id: int) -> bool:
        seen.append(token_id)
        return len(seen) == 10

    ended = engine.generate(prompt, max_tokens=24, ignore_eos=True, on_token=end_at_the_tenth)
    assert ended.token_ids == whole.token_ids[:10]
    assert (ended.finish_reason, whole.finish_reason) == ("stop", "length")


def test_an_engine_that_is_closed_by_on_token_says_what_to_do_and_goes_on(open_engine: OpenEngine):
    engine = open_engine(wait_timeout_s=3600.0)  # nobody waits for the thread that would wait

    def close(_: int) -> None:
        engine.close()

    with pytest.raises(LlamaError, match="close was called by on_token.*return True from on_token"):
        engine.generate([1, 2, 3], max_tokens=4, on_token=close)
    assert engine.generate([1, 2, 3], max_tokens=1).prompt_tokens == 3


def test_an_error_of_the_caller_ends_the_request_and_the_engine_goes_on(open_engine: OpenEngine):
    engine = open_engine()
    prompt = manual(engine, 100)

    def fail(_: int) -> None:
        raise RuntimeError("the caller's")

    with pytest.raises(RuntimeError, match="the caller's"):
        engine.generate(prompt, max_tokens=4, on_token=fail)
    assert engine.generate(prompt, max_tokens=4).hit_tokens == 96


def test_a_build_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(binding, "BUILDS", ("2026.9.1",))
    with pytest.raises(PluginError, match=r"pip install xllamacpp==2026\.9\.1"):
        binding.library.__wrapped__()
    monkeypatch.setattr(binding, "PACKAGE", "xllamacpp_of_nobody")
    with pytest.raises(PluginError, match=r"needs llama\.cpp: pip install"):
        binding.library.__wrapped__()


def test_structs_that_are_not_those_of_the_build_are_refused(monkeypatch):
    fields = binding.ContextParams._fields_[1:]  # as if one in front had gone
    shifted = type("ContextParams", (ctypes.Structure,), {"_fields_": fields})
    signature = {**binding._OF_THIS_BUILD, "llama_context_default_params": (shifted, ())}
    monkeypatch.setattr(binding, "_OF_THIS_BUILD", signature)
    with pytest.raises(PluginError, match=r"the structs of its llama\.h are not those"):
        binding.library.__wrapped__()


def test_the_engine_can_be_opened_again_after_a_refusal(open_engine: OpenEngine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Context, "read_block", lambda *_: False)
        with pytest.raises(UnsupportedModelError):
            open_engine()
    assert isinstance(open_engine(), Engine)
