import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from transformers import DynamicCache

from kvtier_core import ClosedError, ConfigError, UnsupportedModelError
from kvtier_transformers.compat import cache_keyword
from kvtier_transformers.decoding import GreedyDecoder
from kvtier_transformers.engine import Engine
from kvtier_transformers.errors import CacheError
from tests.transformers.tiny import BLOCK, device_kv, save_model, tiny_model, tokens, write_settings

if TYPE_CHECKING:
    from kvtier_core.engine import EngineSession

NEW = 12


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> Path:
    return save_model(tiny_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)


@pytest.fixture
def settings(tmp_path) -> Path:
    return write_settings(tmp_path)


def open_engine(model, settings, **options):
    return Engine.open(model, config=settings, **{"max_tokens": 200, "chunk_tokens": 40, **options})


def plain(model, prompt, count=NEW):
    """Greedy tokens and first logits by transformers' own cache."""
    decoder = GreedyDecoder(
        model, DynamicCache(config=model.config), chunk_tokens=len(prompt), on_progress=lambda _: None
    )
    logits = first = decoder.prefill(prompt)
    found = [int(logits.argmax())]
    while len(found) < count:
        found.append(int(decoder.step(found[-1]).argmax()))
    return tuple(found), first


def check(model, prompt, generation):
    """The generation is what the model says without kvtier."""
    expected, first = plain(model, prompt, len(generation.token_ids))
    assert generation.token_ids == expected
    torch.testing.assert_close(generation.first_logits, first, atol=1e-4, rtol=1e-4)


def test_c10_the_second_time_comes_from_the_pool(model, settings):
    prompt = tokens(100)
    with open_engine(model, settings) as engine:
        first = engine.generate(prompt, max_tokens=NEW)
        second = engine.generate(prompt, max_tokens=NEW)
    check(model, prompt, first)
    check(model, prompt, second)
    assert (first.hit_tokens, first.hits_by_tier) == (0, {})
    assert (second.hit_tokens, second.hits_by_tier) == (96, {"pool": 96})
    assert first.misses == [{"from_token": 0, "group": 0, "reason": "not_stored"}]
    assert second.misses == []
    assert first.prompt_tokens == second.prompt_tokens == 100
    assert 0 < second.load_s <= second.ttft_s <= second.seconds


def test_k7_o1_a_new_engine_over_the_same_root_loads_from_disk(model, settings):
    prompt = tokens(100)
    with open_engine(model, settings) as engine:
        engine.generate(prompt, max_tokens=NEW)
        assert engine.flush(60)
    with open_engine(model, settings) as engine:
        generation = engine.generate(prompt, max_tokens=NEW)
        assert engine.stats()["tiers"]["disk"]["loaded_blocks"] == 6
    assert generation.hits_by_tier == {"disk": 96}
    check(model, prompt, generation)


@pytest.mark.parametrize("blocks", [1, 4])
def test_k12_o4_a_wholly_cached_prompt_leaves_one_token_to_compute(model, settings, blocks):
    prompt = tokens(blocks * BLOCK)
    with open_engine(model, settings) as engine:
        engine.generate(prompt, max_tokens=NEW)
        generation = engine.generate(prompt, max_tokens=NEW)
    assert generation.hit_tokens == (blocks - 1) * BLOCK <= len(prompt) - 1
    check(model, prompt, generation)


def test_generated_tokens_are_kept_too(model, settings):
    prompt = tokens(30)
    with open_engine(model, settings) as engine:
        first = engine.generate(prompt, max_tokens=40)
        longer = [*prompt, *first.token_ids]
        generation = engine.generate(longer, max_tokens=NEW)
    # the last generated token was never computed: 69 tokens, 4 whole blocks
    assert generation.hit_tokens == 64
    check(model, longer, generation)


def test_k1_o4_salts_share_nothing(model, settings):
    prompt = tokens(100)
    with open_engine(model, settings) as engine:
        engine.generate(prompt, max_tokens=2, salt="a")
        assert engine.generate(prompt, max_tokens=2, salt="b").hit_tokens == 0
        assert engine.generate(prompt, max_tokens=2).hit_tokens == 0
        assert engine.generate(prompt, max_tokens=2, salt="a").hit_tokens == 96


def test_k1_o2_another_model_over_the_same_root_misses(model, settings, tmp_path):
    prompt = tokens(100)
    with open_engine(model, settings) as engine:
        engine.generate(prompt, max_tokens=2)
        assert engine.flush(60)
    save_model(tiny_model(seed=5), tmp_path / "model")
    other = type(model).from_pretrained(tmp_path / "model", local_files_only=True)
    with open_engine(other, settings) as engine:
        generation = engine.generate(prompt, max_tokens=NEW)
    assert generation.hit_tokens == 0
    check(other, prompt, generation)


def test_k2_flipped_bytes_on_disk_are_computed_anew(model, settings, tmp_path):
    prompt = tokens(100)
    with open_engine(model, settings) as engine:
        engine.generate(prompt, max_tokens=2)
        assert engine.flush(60)
    (file,) = (tmp_path / "blocks").rglob("*.ext")
    raw = bytearray(file.read_bytes())
    for page in range(2 * 4096, len(raw), 4096):  # what comes before are header and keys
        raw[page + 1000] ^= 1
    file.write_bytes(raw)
    with open_engine(model, settings) as engine:
        generation = engine.generate(prompt, max_tokens=NEW)
        assert engine.stats()["tiers"]["disk"]["integrity_misses"] >= 1
    assert generation.hit_tokens == 0
    check(model, prompt, generation)


def test_c13_a_pool_smaller_than_the_prompt_gives_a_shorter_prefix(model, tmp_path):
    prompt = tokens(180)
    settings = write_settings(tmp_path, capacity="64KiB")  # 5 rows of 12 KiB; the prompt has 11 blocks
    with open_engine(model, settings) as engine:
        for _ in range(3):
            generation = engine.generate(prompt, max_tokens=NEW)
            check(model, prompt, generation)
            assert engine.flush(60)
        assert engine.stats()["pool"]["rows"] == 5


def test_many_prompts_over_one_device_never_mix(model, settings):
    prompts = [tokens(40 + 7 * number, seed=number % 4) for number in range(12)]
    with open_engine(model, settings) as engine:
        for prompt in prompts:
            check(model, prompt, engine.generate(prompt, max_tokens=3))


@pytest.mark.parametrize("chunk", [1, BLOCK, 1000])
def test_the_chunk_size_changes_nothing(model, settings, chunk):
    prompt = tokens(70)
    with open_engine(model, settings, chunk_tokens=chunk) as engine:
        check(model, prompt, engine.generate(prompt, max_tokens=NEW))
        check(model, prompt, engine.generate(prompt, max_tokens=NEW))


def test_the_end_token_ends_the_completion(model, settings, monkeypatch):
    prompt = tokens(50)
    expected, _ = plain(model, prompt)
    monkeypatch.setattr(model.generation_config, "eos_token_id", [expected[3], 9999])
    length = expected.index(expected[3]) + 1
    seen: list[int] = []
    with open_engine(model, settings) as engine:
        stopped = engine.generate(prompt, max_tokens=NEW, on_token=seen.append)
        ignored = engine.generate(prompt, max_tokens=NEW, ignore_eos=True)
    assert stopped.token_ids == tuple(seen) == expected[:length]
    assert stopped.finish_reason == "stop"
    assert ignored.token_ids == expected
    assert ignored.finish_reason == "length"


def test_choose_picks_each_token_by_logits_that_are_its_own(model, settings):
    prompt = tokens(50)
    expected, first = plain(model, prompt, 1)
    seen = []

    def least_likely(logits):
        seen.append(logits.copy())
        picked = int(logits.argmin())
        logits[:] = 0.0
        return picked

    with open_engine(model, settings) as engine:
        chosen = engine.generate(prompt, max_tokens=3, choose=least_likely)
        again = engine.generate(prompt, max_tokens=1)
    assert chosen.token_ids == tuple(int(logits.argmin()) for logits in seen)
    assert torch.equal(chosen.first_logits, torch.from_numpy(seen[0]))
    assert torch.allclose(chosen.first_logits, first, atol=1e-3)
    assert again.token_ids == expected


def test_the_end_token_may_have_the_id_0(settings):
    model, prompt = tiny_model(), tokens(50)
    model.generation_config.eos_token_id = 0
    first = plain(model, prompt, 1)[0][0]
    with torch.no_grad():
        model.lm_head.weight[[0, first]] = model.lm_head.weight[[first, 0]]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    assert expected[0, len(prompt) :].tolist() == [0]
    with open_engine(model, settings) as engine:
        generation = engine.generate(prompt, max_tokens=NEW)
    assert (generation.token_ids, generation.finish_reason) == ((0,), "stop")


def test_a_model_without_a_head_is_refused_by_generate_and_served_by_cache_for(model, settings):
    ids = torch.tensor([tokens(50)])
    with open_engine(model.model, settings) as engine:
        with pytest.raises(UnsupportedModelError, match="LlamaModel does not generate: load it with"):
            engine.generate(ids[0].tolist())
        with torch.no_grad(), engine.cache_for(ids) as prompt:
            model.model(ids, **{cache_keyword(model.model): prompt.cache})
            prompt.store(ids)


def test_generate_takes_what_a_tokenizer_returns_as_cache_for_does(model, settings):
    prompt = tokens(50)
    with open_engine(model, settings) as engine:
        for ids in (torch.tensor(prompt), torch.tensor([prompt])):
            check(model, prompt, engine.generate(ids, max_tokens=2))
        with pytest.raises(CacheError, match="a batch of 2"):
            engine.generate(torch.ones(2, 5, dtype=torch.long))


def test_c13_an_error_in_the_callback_aborts_and_the_next_request_is_fine(model, settings):
    prompt = tokens(100)

    def stop(_token):
        raise RuntimeError("no more")

    with open_engine(model, settings) as engine:
        with pytest.raises(RuntimeError, match="no more"):
            engine.generate(prompt, max_tokens=NEW, on_token=stop)
        generation = engine.generate(prompt, max_tokens=NEW)
        assert generation.hit_tokens == 96  # what was computed before the error counts
        check(model, prompt, generation)


def test_a_second_sequence_meanwhile_is_refused(model, settings):
    with open_engine(model, settings) as engine:

        def again(_token):
            engine.generate(tokens(5), max_tokens=1)

        with pytest.raises(CacheError, match="busy with another sequence"):
            engine.generate(tokens(5), max_tokens=1, on_token=again)
        check(model, tokens(5), engine.generate(tokens(5), max_tokens=1))


@pytest.mark.parametrize(
    ("count", "max_tokens", "problem"),
    [
        (0, 1, "prompt is empty"),
        (5, 0, "max_tokens must be at least 1"),
        (200, 10, r"opened for 208; .*larger max_tokens"),
    ],
)
def test_c54_what_can_not_run_is_refused(model, settings, count, max_tokens, problem):
    with open_engine(model, settings) as engine, pytest.raises(CacheError, match=problem):
        engine.generate(tokens(count), max_tokens=max_tokens)


def test_c54_the_last_token_needs_no_room(model, settings):
    with open_engine(model, settings, max_tokens=64) as engine:
        generation = engine.generate(tokens(60), max_tokens=5)
    check(model, tokens(60), generation)


def test_c34_close_twice_and_use_after_close(model, settings):
    engine = open_engine(model, settings)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.generate(tokens(5))


def test_open_refuses_models_and_numbers(settings, model):
    with pytest.raises(UnsupportedModelError):
        open_engine(torch.nn.Linear(2, 2), settings)
    with pytest.raises(ConfigError, match="chunk_tokens=0"):
        open_engine(model, settings, chunk_tokens=0)


def test_cache_for_generate_skips_what_is_loaded_and_stores_what_was_made(model, settings):
    prompt = torch.tensor([tokens(100)])
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)
    hits, output = [], prompt
    with open_engine(model, settings) as engine:
        for _ in range(2):
            with engine.cache_for(prompt) as cached:
                output = model.generate(prompt, **options, **{cache_keyword(model): cached.cache})
                cached.store(output)
            assert output.tolist() == expected.tolist()
            hits.append(cached.hit_tokens)
        follow_up = [*output[0].tolist(), 5]
        generation = engine.generate(follow_up, max_tokens=NEW)
    assert hits == [0, 96]
    assert generation.hit_tokens == 112  # 119 tokens were computed: 7 whole blocks
    check(model, follow_up, generation)


def test_cache_for_without_store_keeps_nothing(model, settings):
    prompt = tokens(64)
    with open_engine(model, settings) as engine:
        with engine.cache_for(prompt) as cached, torch.no_grad():
            model(input_ids=torch.tensor([prompt]), **{cache_keyword(model): cached.cache})
        assert engine.generate(prompt, max_tokens=1).hit_tokens == 0


def test_cache_for_stores_no_token_that_was_not_computed(model, settings):
    prompt = tokens(100)
    with open_engine(model, settings) as engine:
        with engine.cache_for(prompt) as cached, torch.no_grad():
            model(input_ids=torch.tensor([prompt[:40]]), **{cache_keyword(model): cached.cache})
            cached.store(prompt)
        generation = engine.generate(prompt, max_tokens=NEW)
    assert generation.hit_tokens == 32
    check(model, prompt, generation)


def test_cache_for_refuses_foreign_sequences(model, settings):
    with (
        open_engine(model, settings) as engine,
        pytest.raises(CacheError, match="does not begin with the prompt"),
        engine.cache_for(tokens(20)) as cached,
    ):
        cached.store(tokens(20, seed=1))


class SlowSession:
    """Holds nothing and records the order of calls; its device stores end when the test says so."""

    def __init__(self):
        self.calls = []
        self.stores_end = False
        self.loads_end = True

    def __getattr__(self, name):
        def record(*_args, **_options):
            self.calls.append(name)
            return {"wait_matched": 32, "wait_loaded": 0, "wait_stored": self.stores_end}.get(name)

        return record

    def wait_loaded(self, *_args):
        if not self.loads_end:
            raise TimeoutError("still loading")
        return 0

    def abort(self, *_args):
        self.calls.append("abort")
        if not self.loads_end:
            raise TimeoutError("still loading")


def slow_engine(model):
    session = SlowSession()
    kv = device_kv(model)
    return Engine(model, kv, cast("EngineSession", session)), kv, session


def test_k4_o1_device_blocks_are_not_written_while_they_are_being_stored(model):
    engine, kv, session = slow_engine(model)
    engine.generate(tokens(40), max_tokens=1)
    before = [tensor.clone() for tensor in kv.tensors]
    session.calls.clear()
    with pytest.raises(CacheError, match="not copied to the pool within"):
        engine.generate(tokens(40, seed=1), max_tokens=1)
    assert session.calls == ["wait_stored"]
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(kv.tensors, before, strict=True))
    session.stores_end = True
    engine.generate(tokens(40, seed=1), max_tokens=1)


def test_k4_o1_device_blocks_are_not_used_again_after_a_load_that_never_ended(model):
    engine, _kv, session = slow_engine(model)
    session.loads_end = False
    with pytest.raises(TimeoutError):
        engine.generate(tokens(40), max_tokens=1)
    assert session.calls[-1] == "abort"
    session.loads_end = session.stores_end = True
    with pytest.raises(CacheError, match="open a new engine"):
        engine.generate(tokens(40), max_tokens=1)


def test_c26_calls_of_one_request_come_in_order(model):
    engine, _kv, session = slow_engine(model)
    engine.generate(tokens(40), max_tokens=3)
    assert session.calls == [
        *["begin", "wait_matched", "load"],
        *["computed", "end_step"],
        *["append", "computed", "end_step"] * 2,
        *["request_hits", "explain", "end"],
    ]


def test_c02_weights_exchanged_on_disk_before_the_engine_opens_answer_for_nobody_else(tmp_path, settings):
    from transformers import AutoModelForCausalLM

    prompt, place = tokens(100), tmp_path / "model"
    models = []
    for seed in (1, 2):
        save_model(tiny_model(seed=seed), place)
        models.append(AutoModelForCausalLM.from_pretrained(place, local_files_only=True))
    old, new = models
    for loaded in (old, new):
        with open_engine(loaded, settings) as engine:
            generation = engine.generate(prompt, max_tokens=NEW)
            assert engine.flush(60)
        check(loaded, prompt, generation)
        assert generation.hit_tokens == 0


def _scale(model):
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2)  # which torch does not count as a change


def _one_item(model):
    with torch.no_grad():
        model.model.embed_tokens.weight[5, 3] += 1


def _other_state(model):
    model.load_state_dict(tiny_model(seed=3).state_dict())


def _other_parameter(model):
    norm = model.model.layers[1].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight * 2)


@pytest.mark.parametrize("change", [_scale, _one_item, _other_state, _other_parameter])
def test_c02_weights_changed_under_an_open_engine_are_refused_and_are_another_model(
    tmp_path, directory, settings, change
):
    from transformers import AutoModelForCausalLM

    changing = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    prompt = tokens(100)
    with open_engine(changing, settings) as engine:
        engine.generate(prompt, max_tokens=2)
        assert engine.flush(60)
        change(changing)
        with pytest.raises(CacheError, match="weights or settings have changed since the engine was opened"):
            engine.generate(prompt, max_tokens=2)
    with open_engine(changing, settings) as engine:
        generation = engine.generate(prompt, max_tokens=NEW)
    assert generation.hit_tokens == 0
    check(changing, prompt, generation)


def test_c02_a_model_whose_mode_or_window_was_changed_under_an_open_engine_is_refused(settings):
    model = tiny_model("mistral")
    with open_engine(model, settings) as engine:
        model.train()
        with pytest.raises(UnsupportedModelError, match="training mode"):
            engine.generate(tokens(40), max_tokens=1)
        model.eval()
        model.config.sliding_window = 8
        with pytest.raises(CacheError, match="settings have changed"):
            engine.generate(tokens(40), max_tokens=1)
        model.config.sliding_window = None
        check(model, tokens(40), engine.generate(tokens(40), max_tokens=1))


def test_c01_what_is_stored_twice_from_one_cache_is_keyed_by_its_own_tokens(model, settings):
    prompt = torch.tensor([tokens(100)])

    def go_on(sequence, cache, count):
        return model.generate(
            sequence,
            attention_mask=torch.ones_like(sequence),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            **{cache_keyword(model): cache},
        )

    with open_engine(model, settings) as engine:
        with engine.cache_for(prompt) as cached:
            first = go_on(prompt, cached.cache, 20)
            cached.store(first)
            second = go_on(first, cached.cache, 30)
            cached.store(second)
        made = second[0].tolist()
        twice = [*made[:120], *made[100:150], 7]  # the keys it had when the first twenty were counted twice
        for sequence, hits in (([*made, 7], 144), (twice, 112)):
            generation = engine.generate(sequence, max_tokens=NEW)
            check(model, sequence, generation)
            assert generation.hit_tokens == hits


def test_k4_o1_tokens_may_be_taken_back_once_they_are_stored_but_not_replaced_in_the_store(model, settings):
    prompt = tokens(64)
    with open_engine(model, settings) as engine:
        with engine.cache_for(prompt) as cached, torch.no_grad():
            keyword = {cache_keyword(model): cached.cache}
            model(input_ids=torch.tensor([tokens(96)]), **keyword)
            cached.store(tokens(96))
            cached.cache.crop(-40)
            other = [*tokens(56), *tokens(40, seed=4)]
            model(input_ids=torch.tensor([other[56:]]), **keyword)
            with pytest.raises(CacheError, match="does not begin with the 96 tokens stored before"):
                cached.store(other)
        for sequence in (tokens(100), [*other, 5]):
            check(model, sequence, engine.generate(sequence, max_tokens=NEW))


def test_k4_o1_a_cache_that_is_over_writes_no_more(model, settings):
    prompt = tokens(64)
    with open_engine(model, settings) as engine:
        with engine.cache_for(prompt) as cached, torch.no_grad():
            keyword = {cache_keyword(model): cached.cache}
            model(input_ids=torch.tensor([prompt]), **keyword)
            cached.store(prompt)
        before = [tensor.clone() for tensor in engine._kv.tensors]
        with pytest.raises(CacheError, match="this cache is over"), torch.no_grad():
            model(input_ids=torch.tensor([tokens(64, seed=2)]), **keyword)
        assert all(torch.equal(one, other) for one, other in zip(before, engine._kv.tensors, strict=True))
        generation = engine.generate(tokens(70), max_tokens=NEW)
        assert generation.hit_tokens == 64
        check(model, tokens(70), generation)


def test_c03_a_forward_pass_that_was_cut_off_is_not_stored(model, settings):
    prompt = tokens(64)
    layer = model.model.layers[1]

    def stop(*_args):
        raise KeyboardInterrupt

    with open_engine(model, settings) as engine:
        with engine.cache_for(prompt) as cached, torch.no_grad():
            keyword = {cache_keyword(model): cached.cache}
            handle = layer.register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                model(input_ids=torch.tensor([prompt]), **keyword)
            handle.remove()
            with pytest.raises(CacheError, match="cut off half way"):
                cached.store(prompt)
        generation = engine.generate(prompt, max_tokens=NEW)
    assert generation.hit_tokens == 0
    check(model, prompt, generation)


def test_c02_kv_of_a_lower_precision_is_not_stored_as_the_models_own(model, settings):
    prompt = tokens(64)
    with open_engine(model, settings) as engine:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(CacheError, match=r"computes KV in torch\.bfloat16"),
        ):
            engine.generate(prompt, max_tokens=1)
        generation = engine.generate(prompt, max_tokens=NEW)
    assert generation.hit_tokens == 0
    check(model, prompt, generation)


class Elsewhere:
    """A sequence of its own thread, which stays at its first token until it is told to go on."""

    def __init__(self, engine, prompt):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.outcome = None
        self._thread = threading.Thread(target=self._run, args=(engine, prompt))
        self._thread.start()
        assert self.begun.wait(60)

    def _run(self, engine, prompt):
        try:
            self.outcome = engine.generate(prompt, max_tokens=NEW, on_token=self._stay)
        except ClosedError as error:
            self.outcome = error

    def _stay(self, _token):
        self.begun.set()
        assert self.go_on.wait(60)

    def end(self):
        self.go_on.set()
        self._thread.join(60)
        return self.outcome


def test_a_second_thread_is_refused_while_a_sequence_runs(model, settings):
    with open_engine(model, settings) as engine:
        elsewhere = Elsewhere(engine, tokens(50))
        for use in (lambda: engine.generate(tokens(5), max_tokens=1), engine.flush):
            with pytest.raises(CacheError, match="busy with another sequence"):
                use()
        check(model, tokens(50), elsewhere.end())
        assert engine.flush(60)


def test_c34_closing_ends_another_threads_sequence_first(model, settings):
    engine = open_engine(model, settings)
    elsewhere = Elsewhere(engine, tokens(50))
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._closed:
        time.sleep(0)
    assert isinstance(elsewhere.end(), ClosedError)
    closing.join(60)
    assert not closing.is_alive()
    engine.close()


def test_c34_a_sequence_that_does_not_end_keeps_the_engine_open(model, settings):
    engine = open_engine(model, settings, wait_timeout_s=0.05)
    elsewhere = Elsewhere(engine, tokens(50))
    with pytest.raises(CacheError, match="another thread did not end its sequence"):
        engine.close()
    assert isinstance(elsewhere.end(), ClosedError)
    engine.close()


def _in_a_child(work):
    """What *work* wrote down in a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        said = json.loads(answers.read())
    os.waitpid(child, 0)
    return said


def test_r10_a_forked_child_is_told_at_once_to_open_its_own_engine(model, settings):
    prompt = tokens(100)
    patience_s = 100.0

    with open_engine(model, settings, wait_timeout_s=patience_s) as engine:
        engine.generate(prompt, max_tokens=2)
        cached = engine.cache_for(prompt)

        def use_it():
            said = []
            started = time.monotonic()
            for use in (
                lambda: engine.generate(prompt, max_tokens=2),
                lambda: engine.generate(prompt, max_tokens=2),
                lambda: engine.flush(patience_s),
                cached.__enter__,
            ):
                try:
                    use()
                except Exception as error:  # noqa: BLE001 - the parent looks at it
                    said.append(f"{type(error).__name__}: {error}")
            engine.close()
            engine.close()
            return {"said": said, "was_quick": time.monotonic() - started < patience_s / 4}

        answers = _in_a_child(use_it)
        assert engine.generate(prompt, max_tokens=2).hit_tokens == 96
        assert engine.flush(60)
    assert answers["was_quick"]
    assert len(answers["said"]) == 4
    for line in answers["said"]:
        assert line.startswith("ClosedError: this process was forked"), line
        assert "open another" in line


def test_r10_a_fork_while_a_sequence_runs_leaves_the_child_no_engine_to_wait_for(model, settings):
    engine = open_engine(model, settings)
    elsewhere = Elsewhere(engine, tokens(50))

    def use_it():
        started = time.monotonic()
        engine.close()
        try:
            engine.generate(tokens(5), max_tokens=1)
        except ClosedError as error:
            return {"said": str(error), "was_quick": time.monotonic() - started < 20}

    answers = _in_a_child(use_it)
    assert answers["was_quick"]
    assert "forked" in answers["said"]
    elsewhere.end()
    engine.close()
