from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import DynamicCache

from kvtier_core import ClosedError, ConfigError, EngineSession, UnsupportedModelError
from kvtier_transformers.cache import CacheError, DeviceKV
from kvtier_transformers.compat import cache_keyword
from kvtier_transformers.decoding import GreedyDecoder
from kvtier_transformers.engine import Engine
from tests.transformers.tiny import BLOCK, save_model, tiny_model, tokens, write_settings

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


def test_cache_for_refuses_batches_and_foreign_sequences(model, settings):
    with open_engine(model, settings) as engine:
        with pytest.raises(CacheError, match="a batch of 2"), engine.cache_for(torch.ones(2, 5)):
            pass
        with (
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
            return {"wait_loadable": 32, "wait_loaded": 0, "wait_stored": self.stores_end}.get(name)

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
    kv = DeviceKV(model, max_tokens=64, tokens_per_block=BLOCK)
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
        *["new_request", "wait_loadable", "load"],
        *["computed", "end_step"],
        *["append", "computed", "end_step"] * 2,
        *["request_hits", "finish"],
    ]
