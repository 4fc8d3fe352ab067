"""llama-cpp-python's ``Llama`` with kvtier: answers are those of ``Llama`` alone, and prompts survive a restart."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_llamacpp import LlamaError
from tests.llamacpp.llama import OPTIONS, OTHER, PROMPT, TOKENS, ask, ask_held, assert_same
from tests.llamacpp.test_readme import BLOCK, README
from tests.llamacpp.tiny_gguf import WINDOW, write_gemma3, write_llama

tested = pytest.importorskip("kvtier_llamacpp.llama_cpp_python", exc_type=ImportError)
llama_cpp, KvtierLlama = tested.llama_cpp, tested.KvtierLlama


# ---------------------------------------------------------------------------------------------------- right answers


@pytest.mark.parametrize("tiny", [write_llama, write_gemma3], indirect=True)
@pytest.mark.parametrize(
    "changes",
    [{}, {"flash_attn": True}, {"type_k": 0, "type_v": 0}, {"n_batch": 48}],
    ids=str,
)
def test_a_prompt_is_restored_and_every_logit_is_that_of_llama_alone(open_llama, tiny, changes):
    plain = llama_cpp.Llama(str(tiny), swa_full=True, **{**OPTIONS, **changes})
    assert len(PROMPT) > 4 * WINDOW
    with open_llama(**changes) as llama:
        assert_same(ask(llama, PROMPT), ask(plain, PROMPT))
        assert llama.hits_by_tier == {}
        assert llama.misses[0]["reason"] == "not_stored"
    with open_llama(**changes) as llama:
        assert_same(ask(llama, PROMPT), ask_held(plain, PROMPT, 192))
        assert llama.hits_by_tier == {"disk": 192}
        assert_same(ask(llama, OTHER), ask_held(plain, OTHER, 100))  # llama.cpp holds more than the 96 stored
        assert llama.hits_by_tier == {}
    with open_llama(**changes) as llama:
        assert_same(ask(llama, OTHER), ask_held(plain, OTHER, 192))
        assert llama.hits_by_tier == {"disk": 192}
    plain.close()


def test_prompts_by_turns_are_restored_from_the_pool(open_llama, plain):
    llama, second = open_llama(), [7, *PROMPT[1:]]
    for prompt in (PROMPT, second):
        assert_same(ask(llama, prompt), ask_held(plain, prompt, 0))
        assert llama.hits_by_tier == {}
    for prompt in (PROMPT, second, PROMPT):
        assert_same(ask(llama, prompt), ask_held(plain, prompt, 192))
        assert llama.hits_by_tier == {"pool": 192}


def test_the_blocks_of_an_answer_are_kept_too(open_llama, plain):
    with open_llama() as llama:
        answer, _ = ask(llama, PROMPT, 40)
        longer = [*PROMPT, *answer, *PROMPT[:5]]
        again = ask(llama, longer)  # of what llama.cpp holds
        assert llama.hits_by_tier == {}
    stored = (len(PROMPT) + 39) // TOKENS * TOKENS
    with open_llama() as llama:
        found = ask(llama, longer)
        assert llama.hits_by_tier == {"disk": (len(longer) - 1) // TOKENS * TOKENS}
        assert found[0] == again[0]
    assert stored < len(longer)


def test_a_prompt_that_llamacpp_holds_to_its_end_is_answered_at_once(open_llama, plain):
    llama = open_llama()
    first = ask(llama, PROMPT[:100])
    assert_same(ask(llama, PROMPT[:100]), ask_held(plain, PROMPT[:100], 99))
    llama.eval([1, 2, 3])
    llama.reset()
    assert ask(llama, PROMPT[:100])[0] == first[0]


def test_an_answer_that_is_left_for_another_prompt_can_not_be_read_on(open_llama, plain):
    llama = open_llama()
    left = llama.generate(PROMPT, temp=0.0)
    next(left)
    assert_same(ask(llama, OTHER), ask_held(plain, OTHER, 100))
    with pytest.raises(LlamaError, match="another prompt was begun before"):
        next(left)
    assert_same(ask(llama, PROMPT), ask_held(plain, PROMPT, 192))
    assert llama.hits_by_tier == {"pool": 192}


# ---------------------------------------------------------------------------------------------------- text of SmolLM2

TEXT = "The manual says: fill the tank with cold water, close the lid, press the red button. " * 3
PROGRAM = """
import json, sys
from kvtier_llamacpp.llama_cpp_python import KvtierLlama

llm = KvtierLlama(sys.argv[1], n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, kvtier=sys.argv[2])
chat = [{"role": "system", "content": sys.argv[3]}, {"role": "user", "content": "What comes first?"}]
asked = {"max_tokens": 4, "temperature": 0}
message = llm.create_chat_completion(chat, **asked)["choices"][0]["message"]["content"]
chat_hits = dict(llm.hits_by_tier)
stream = llm.create_completion(sys.argv[3] + "So", stream=True, **asked)
text = "".join(part["choices"][0]["text"] for part in stream)
whole = llm.create_completion(sys.argv[3] + "So", **asked)["choices"][0]["text"]
print(json.dumps({"message": message, "chat": chat_hits, "text": text, "whole": whole}))
"""


def _run(model, config):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, config, TEXT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(900)
def test_a_process_that_just_ends_leaves_its_prompts_to_the_next_one(model, config):
    plain = llama_cpp.Llama(str(model), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    text = plain.create_completion(TEXT + "So", max_tokens=4, temperature=0)["choices"][0]["text"]
    plain.close()
    first, second = _run(model, config), _run(model, config)
    assert first["text"] == second["text"] == first["whole"] == second["whole"] == text
    assert first["message"] == second["message"]
    assert first["chat"] == {}
    assert second["chat"]["disk"] >= 64


@pytest.mark.timeout(900)
def test_the_readme_restores_its_chat(model, tmp_path, monkeypatch, capsys):
    blocks = dict(BLOCK.findall(README.read_text()))
    monkeypatch.chdir(tmp_path)
    Path("kvtier.toml").write_text(blocks["kvtier.toml"].replace("1GiB", "64MiB"))
    Path("MODEL.gguf").symlink_to(model)
    code = blocks["llama-cpp-python"].replace("n_ctx=4096", f"**{ {**OPTIONS, 'n_ctx': 256} }")
    answers = []
    for _ in range(2):
        exec(compile(code, "README.md", "exec"), {})  # our own README
        answers.append(capsys.readouterr().out.rsplit("\n", 2))
    assert answers[0][0] == answers[1][0]
    assert answers[0][1].startswith("{} ")
    assert answers[1][1].startswith("{'disk': ")


# ---------------------------------------------------------------------------------------------------- tiers that fail

BROKEN_TIER = """
from kvtier_core.tier import BlockTier, TierInfo, TierSettings


class Tier(BlockTier):
    Settings = TierSettings
    info = TierInfo(medium="fake", default_capacity=8 << 20)

    def open(self): ...
    def contains(self, keys): return [True] * len(keys)
    def load(self, key, into): raise OSError("gone")
    def store(self, key, block): raise OSError("full")
    def delete(self, keys): ...
    def close(self): ...
"""


def test_wrong_bytes_cost_hits_and_no_token(open_llama, plain, tmp_path):
    with open_llama() as llama:
        ask(llama, PROMPT)
    for file in (tmp_path / "root").rglob("*"):
        if file.is_file() and file.stat().st_size >= 1 << 20:
            data = bytearray(file.read_bytes())
            data[5000::997] = bytes(byte ^ 1 for byte in data[5000::997])
            file.write_bytes(data)
    with open_llama() as llama:
        assert_same(ask(llama, PROMPT), ask_held(plain, PROMPT, 0))
        assert llama.hits_by_tier == {}


def test_a_block_that_llamacpp_does_not_take_in_costs_hits_and_no_token(open_llama, plain, monkeypatch):
    with open_llama() as llama:
        ask(llama, PROMPT)
    llama = open_llama()
    write_block = tested._BorrowedMemory.write_block
    refused = iter([False, True, False])
    with monkeypatch.context() as patch:
        patch.setattr(
            tested._BorrowedMemory,
            "write_block",
            lambda self, *given: not next(refused, False) and write_block(self, *given),
        )
        assert_same(ask(llama, PROMPT), ask_held(plain, PROMPT, 0))
    assert llama.hits_by_tier == {}


def test_an_error_while_a_prompt_is_restored_leaves_the_next_one_right(open_llama, plain, monkeypatch):
    with open_llama() as llama:
        ask(llama, PROMPT)
    llama = open_llama()
    ask(llama, PROMPT[:20])
    with monkeypatch.context() as patch:
        patch.setattr(tested.Keeper, "misses", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(llama, PROMPT)
    assert_same(ask(llama, PROMPT), ask_held(plain, PROMPT, 192))


def test_a_tier_that_can_not_be_written_costs_hits_and_no_token(open_llama, plain, install_tier):
    install_tier("broken", source=BROKEN_TIER)
    llama = open_llama(kvtier={"pool": {"capacity": "32MiB"}, "tiers": {"broken": {"type": "broken"}}})
    for prompt, held in ((PROMPT, 0), (OTHER, 100), (PROMPT, 192)):
        assert_same(ask(llama, prompt), ask_held(plain, prompt, held))
    assert llama.hits_by_tier == {"pool": 192}
    llama.flush(1.0)
    llama._keeper._session.reset_cache()  # so that the tier alone is asked
    assert_same(ask(llama, OTHER), ask_held(plain, OTHER, 100))
    assert_same(ask(llama, [7, *PROMPT]), ask_held(plain, [7, *PROMPT], 0))
    assert llama.hits_by_tier == {}
