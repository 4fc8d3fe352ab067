"""What ``KvtierLlama`` does not keep, what it refuses, what tells blocks apart, and how it ends."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier_core import ClosedError, ConfigError, PluginError, UnsupportedModelError
from kvtier_llamacpp import LlamaError
from tests.llamacpp.llama import OPTIONS, OTHER, PROMPT, ask, ask_held, assert_same
from tests.llamacpp.tiny_gguf import write_bert, write_jamba, write_llama, write_long_rope

tested = pytest.importorskip("kvtier_llamacpp.llama_cpp_python", exc_type=ImportError)
llama_cpp, KvtierLlama = tested.llama_cpp, tested.KvtierLlama
SECOND = [7, *PROMPT[100:], *PROMPT[:60]]

# ---------------------------------------------------------------------------------- what is not the prompt's own KV


def _look_at_a_picture(llama):
    """As a handler of pictures does: what is in memory is more than what its tokens say."""
    llama.reset()
    llama.eval(PROMPT[:20])
    llama_cpp.Llama.eval(llama, PROMPT[100:140])
    llama.input_ids[20:60] = PROMPT[20:60]


def test_kv_that_was_put_beside_eval_is_never_kept_and_nothing_takes_its_place(open_llama, plain):
    asked = PROMPT[:90]
    _look_at_a_picture(plain)
    expected = ask(plain, asked)
    with open_llama() as llama:
        _look_at_a_picture(llama)
        assert_same(ask(llama, asked), expected)
    with open_llama() as llama:
        ask(llama, PROMPT)
        assert llama.hits_by_tier == {}
        _look_at_a_picture(llama)
        assert_same(ask(llama, asked), expected)
        assert llama.hits_by_tier == {}


def test_a_state_that_was_loaded_is_never_kept(open_llama, tiny, tmp_path):
    other = KvtierLlama(str(write_llama(tmp_path / "other.gguf")), kvtier={"tiers": {}}, **OPTIONS)
    other.eval(PROMPT[100:164])
    state = other.save_state()
    other.close()
    state.input_ids[:64] = PROMPT[:64]
    with open_llama() as llama:
        ask(llama, [7, *PROMPT])
        llama.load_state(state)
        ask(llama, PROMPT[:80])
    with open_llama() as llama:
        ask(llama, PROMPT)
        assert llama.hits_by_tier == {}


def test_tokens_that_were_taken_back_end_what_is_kept(open_llama, plain):
    with open_llama() as llama:
        answer = llama.generate(PROMPT[:60], temp=0.0)
        next(answer)
        llama.n_tokens = 40
        llama.eval(PROMPT[100:150])
        answer.close()
        replaced = [*PROMPT[:40], *PROMPT[100:150]]
    with open_llama() as llama:
        ask(llama, replaced)
        assert llama.hits_by_tier == {"disk": 32}
    for neither in (PROMPT, [*PROMPT[:60], *PROMPT[120:150]]):
        with open_llama() as llama:
            assert_same(ask(llama, neither), ask_held(plain, neither, 48))
            assert llama.hits_by_tier == {"disk": 48}


def _compute_beside_a_prompt(llama):
    ask(llama, PROMPT)
    llama.reset()
    llama.eval(SECOND[:50])


def _take_back(llama):
    answer = llama.generate(PROMPT[:60], temp=0.0)
    next(answer)
    llama.n_tokens = 10
    llama.eval(SECOND[10:50])
    llama.n_tokens = 0
    llama.eval(SECOND[:50])
    answer.close()


def _load_a_state(llama):
    llama.eval(SECOND[:50])
    state = llama.save_state()
    ask(llama, PROMPT)
    llama.load_state(state)
    next(llama.generate(SECOND[:60], temp=0.0))
    next(llama.generate([9], temp=0.0))
    llama.reset()
    next(llama.generate(SECOND[:50], temp=0.0, reset=False))


@pytest.mark.parametrize("prepare", [_compute_beside_a_prompt, _take_back, _load_a_state])
def test_blocks_of_a_prompt_are_never_kept_for_what_took_its_place_in_memory(open_llama, plain, prepare):
    with open_llama() as llama:
        prepare(llama)
        ask(llama, SECOND)
    with open_llama() as llama:
        assert_same(ask(llama, SECOND), ask_held(plain, SECOND, 160))
        assert llama.hits_by_tier == {"disk": 160}


def test_a_state_that_llamacpp_does_not_take_in_leaves_nothing_in_memory(open_llama, plain):
    with open_llama() as llama:
        ask(llama, SECOND)
        state = llama.save_state()
        state.llama_state_size = 1000
        state.llama_state = bytes(1000)
        ask(llama, [*PROMPT, *PROMPT])
        with pytest.raises(RuntimeError, match="state data"):
            llama.load_state(state)
        assert_same(ask(llama, SECOND), ask_held(plain, SECOND, 160))
        assert llama.hits_by_tier == {"pool": 160}


def test_without_a_reset_nothing_is_restored_or_kept(open_llama, plain):
    for _ in range(2):
        with open_llama() as llama:
            llama.eval(PROMPT[:50])
            token = next(llama.generate(PROMPT[50:], temp=0.0, reset=False))
            assert token == ask_held(plain, PROMPT, 0)[0][0]
            assert llama.hits_by_tier == {}
            ask(llama, SECOND)
            next(llama.generate(PROMPT[50:], temp=0.0, reset=False))
            assert (llama.hits_by_tier, llama.misses) == ({}, ())


# ---------------------------------------------------------------------------------- what is refused, and the end of it


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"logits_all": True}, "logits_all=True"),
        ({"embedding": True}, "embedding=True"),
        ({"draft_model": object()}, "draft_model="),
        ({"lora_path": "adapter.gguf"}, "lora_path='adapter.gguf'"),
        ({"use_mmap": True}, "use_mmap=True"),
        ({"swa_full": False}, "swa_full=False"),
        ({"vocab_only": True}, "vocab_only=True"),
        ({"chat_handler": object.__new__(llama_cpp.llama_chat_format.Qwen25VLChatHandler)}, "chat_handler"),
    ],
    ids=str,
)
def test_an_option_that_is_not_served_is_refused_by_its_name(open_llama, options, why):
    with pytest.raises(UnsupportedModelError, match=why):
        open_llama(**options)


def test_layers_on_a_gpu_are_refused_where_the_build_knows_one(open_llama, monkeypatch):
    open_llama(n_gpu_layers=-1).close()
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    with pytest.raises(UnsupportedModelError, match="n_gpu_layers=-1"):
        open_llama(n_gpu_layers=-1)


def test_a_second_cache_is_refused(open_llama):
    llama = open_llama()
    with pytest.raises(UnsupportedModelError, match="leave set_cache out"):
        llama.set_cache(llama_cpp.LlamaRAMCache())
    llama.set_cache(None)


def test_models_and_sizes_that_are_not_served_are_refused(open_llama, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"jamba\.gguf \(.+\) keeps a state"):
        open_llama(write_jamba(tmp_path / "jamba.gguf"))
    with pytest.raises(UnsupportedModelError, match=r"bert\.gguf \(.+\) keeps no KV"):
        open_llama(write_bert(tmp_path / "bert.gguf"))
    with pytest.raises(ConfigError, match=r"none\.gguf: no such file"):
        open_llama(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match=r"n_ctx=20: blocks of 16 tokens need at least 35"):
        open_llama(n_ctx=20)


def test_another_version_is_refused(open_llama, monkeypatch):
    monkeypatch.setattr(llama_cpp, "__version__", "0.3.1")
    with pytest.raises(PluginError, match=r"not of the 0\.3\.1 .*pip install llama-cpp-python=="):
        open_llama()


@pytest.mark.parametrize(
    "changes",
    [{"n_threads": 2}, {"n_batch": 64}, {"type_k": 0}, {"rope_freq_base": 5e5}, {"flash_attn": True}],
    ids=str,
)
def test_what_changes_the_kv_changes_its_name(open_llama, changes):
    with open_llama() as llama:
        ask(llama, PROMPT)
    with open_llama(**changes) as llama:
        ask(llama, PROMPT, 1)
        assert llama.hits_by_tier == {}


def test_overrides_of_the_file_change_the_name(open_llama):
    with open_llama() as llama:
        ask(llama, PROMPT)
    with open_llama(kv_overrides={"llama.rope.freq_base": 5e5}) as llama:
        ask(llama, PROMPT, 1)
        assert llama.hits_by_tier == {}


def test_overrides_of_what_chooses_the_rope_keep_rooms_apart(open_llama, tmp_path):
    path = write_long_rope(tmp_path / "long.gguf")
    more = {"kv_overrides": {"llama.rope.scaling.original_context_length": 1024}}
    with open_llama(path, **more) as llama:
        ask(llama, PROMPT)
    with open_llama(path, n_ctx=2048, **more) as llama:
        ask(llama, PROMPT, 1)
        assert llama.hits_by_tier == {}


def test_a_room_of_another_size_shares_the_blocks(open_llama):
    with open_llama() as llama:
        ask(llama, PROMPT)
    with open_llama(n_ctx=1024) as llama:
        ask(llama, PROMPT, 1)
        assert llama.hits_by_tier == {"disk": 192}


@pytest.fixture
def other_thread():
    """A thread beside the test's own."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_another_thread_is_refused_meanwhile(open_llama, other_thread):
    llama = open_llama()
    tried = []

    def try_from_another(*_):
        with pytest.raises(LlamaError, match="another thread uses this KvtierLlama"):
            other_thread.submit(next, llama.generate(OTHER)).result()
        tried.append(True)
        return False

    answer = llama.generate(PROMPT, temp=0.0, stopping_criteria=try_from_another)
    found = [next(answer) for _ in range(3)]
    assert found == ask(open_llama(), PROMPT, 3)[0]
    assert len(tried) == 3


def test_close_waits_for_a_step_on_another_thread(open_llama, other_thread):
    llama = open_llama(wait_timeout_s=0.1)
    with llama._alone, pytest.raises(LlamaError, match=r"did not end within 0\.1 s: close again"):
        other_thread.submit(llama.close).result()
    assert ask(llama, PROMPT, 1)[0]
    other_thread.submit(llama.close).result()


def test_what_is_closed_says_so(open_llama):
    llama = open_llama()
    answer = llama.generate(PROMPT, temp=0.0)
    next(answer)
    llama.close()
    llama.close()
    uses = (
        lambda: next(answer),
        lambda: next(llama.generate(PROMPT)),
        lambda: llama.eval(PROMPT),
        lambda: llama.tokenize(b"text"),
        lambda: llama(PROMPT),
    )
    for use in uses:
        with pytest.raises(ClosedError, match="was closed"):
            use()


def test_one_that_is_dropped_stores_what_it_computed(open_llama, tiny, config):
    llama = KvtierLlama(str(tiny), kvtier=config, **OPTIONS)
    ask(llama, PROMPT)
    del llama
    with open_llama(kvtier=str(config)) as llama:
        ask(llama, PROMPT)
        assert llama.hits_by_tier == {"disk": 192}


def test_it_can_be_pickled_with_its_settings(open_llama):
    with open_llama(wait_timeout_s=7.0) as llama:
        ask(llama, PROMPT)
        saved = pickle.dumps(llama)
    with pickle.loads(saved) as again:
        assert again.__getstate__()["wait_timeout_s"] == 7.0
        ask(again, PROMPT)
        assert again.hits_by_tier == {"disk": 192}


def test_a_forked_child_ends_nothing(open_llama):
    llama = open_llama()
    ask(llama, PROMPT)
    child = os.fork()
    if not child:
        llama.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert llama.flush()
    assert ask(llama, PROMPT, 1)[0]
