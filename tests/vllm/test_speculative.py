"""Speculative decoding in real vLLM with a disk: what is accepted is stored, what is not never is (V8).

That every kind of drafter gives right answers, from pool and disk, is shown in ``features``.
"""

import random

import pytest

from tests.vllm import drafters
from tests.vllm.asks import ACCEPTED, DRAFTED
from tests.vllm.engines import BLOCK, EngineError, connector, disk, needs_vllm, prompt
from tests.vllm.models import save_tiny_model

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

WORDS = 12
"""So few that the text's end is often found in earlier text, and what followed there is sometimes right."""
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


def test_v8_ngram_speculation_is_served_with_a_disk_over_a_restart(start, tmp_path):
    model = save_tiny_model(tmp_path / "model", vocab_size=WORDS)
    words = random.Random(8)
    wanted = [[words.randrange(1, WORDS) for _ in range(3 * BLOCK + 9)] for _ in range(2)]
    plain = start(model=model, enable_prefix_caching=False)
    expected = plain.generate(*wanted, max_tokens=4 * BLOCK)
    longer = [[*tokens, *said, 1] for tokens, said in zip(wanted, expected, strict=True)]
    then = plain.generate(*longer)
    assert plain.close() == 0

    transfer = connector(disk(tmp_path / "root"), offload_prompt_only=False)
    options = {"model": model, "speculative_config": NGRAM}
    first = start(transfer, **options)
    assert first.generate(*wanted, max_tokens=4 * BLOCK) == expected
    metrics = first.call("metrics")
    drafted = metrics["vllm:spec_decode_num_draft_tokens"]
    assert 0 < metrics["vllm:spec_decode_num_accepted_tokens"] < drafted, "all was accepted, or nothing"
    first.generate([1, 2, 3])
    first.call("settle")
    assert first.call("reset", connector=True)
    assert first.generate(*longer) == then
    hits = first.call("books")["hits"]["disk"]
    assert hits > 2 * 3  # blocks that were decoded, too
    assert first.close() == 0

    second = start(transfer, **options)
    assert second.generate(*longer) == then
    assert second.call("books")["hits"]["disk"] >= hits
    assert second.close() == 0


SAVE = {
    "draft_model": drafters.save_same,
    "eagle": drafters.save_eagle,
    "eagle3": drafters.save_eagle3,
    "eagle3 with a window": drafters.save_windowed_eagle3,
    "medusa": drafters.save_medusa,
}


def speculating(drafter, method="draft_model"):
    return {
        "speculative_config": {"method": method, "model": str(drafter), "num_speculative_tokens": 3},
        "num_gpu_blocks_override": 100,
    }


@pytest.mark.parametrize("method", ["ngram", *SAVE])
def test_v8_the_models_kv_is_the_same_byte_by_byte_whatever_proposes(
    start, model, tmp_path, plain_layers, method
):
    if method == "ngram":
        options = {"speculative_config": NGRAM}
    else:
        options = speculating(SAVE[method](tmp_path / "drafter", model), method.partition(" ")[0])
    assert_same_kv(prompt_layers(start, **options), plain_layers)


def test_v8_the_models_kv_is_the_same_byte_by_byte_with_a_layer_of_the_model_that_proposes(start, tmp_path):
    options = {"model": drafters.save_ernie(tmp_path / "model"), "num_gpu_blocks_override": 100}
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    found, plain_layers = (
        prompt_layers(start, speculative_config=mtp, **options),
        prompt_layers(start, **options),
    )
    assert_same_kv(found, plain_layers)
    assert all(len(found[key]) == len(layers) + 1 for key, layers in plain_layers.items())


def assert_same_kv(found, plain):
    """Of each of the model's layers. With a window in the engine, vLLM gives each of them a KV group of its own."""
    found, plain = merge_groups(found), merge_groups(plain)
    assert found.keys() >= plain.keys()
    for block, layers in plain.items():
        assert {layer: found[block][layer] for layer in layers} == layers


def merge_groups(found):
    """The layers of all groups, by the hashes of blocks: a key is a hash and four bytes of the group's number."""
    blocks: dict[str, dict[str, str]] = {}
    for key, layers in found.items():
        blocks.setdefault(key[:-8], {}).update(layers)
    return blocks


@pytest.fixture(scope="module")
def plain_layers(start):
    return prompt_layers(start)


def prompt_layers(start, **options):
    """What stands for the bytes of each layer, by the keys of a prompt's blocks."""
    engine = start(connector({"pool": {"capacity": "8MiB"}}), **options)
    engine.generate(prompt(1), max_tokens=2 * BLOCK)
    engine.generate([1, 2, 3])
    engine.call("settle")
    found = engine.call("layers_in_pool")
    assert engine.close() == 0
    assert len(found) >= 10
    return found


def test_v8_another_drafters_kv_is_not_loaded_and_the_same_ones_is_accepted_as_if_it_were_computed(
    start, model, plain, tmp_path
):
    same = drafters.save_same(tmp_path / "same", model)
    other = save_tiny_model(tmp_path / "other", seed=7)
    wanted = prompt(1)
    expected = plain.generate(wanted, max_tokens=2 * BLOCK)
    transfer = connector(disk(tmp_path / "root"))
    drafts = []
    for drafter, hits in ((same, None), (other, None), (same, 10)):
        engine = start(transfer, **speculating(drafter))
        assert engine.generate(wanted, max_tokens=2 * BLOCK) == expected
        metrics = engine.call("metrics")
        drafts.append((metrics[DRAFTED], metrics[ACCEPTED]))
        engine.generate([1, 2, 3])
        assert engine.call("settle")["hits"].get("disk") == hits
        assert engine.close() == 0
    assert drafts[2] == drafts[0]
    assert drafts[0][1] == drafts[0][0] > 0
    assert drafts[1][1] < drafts[1][0]


def test_v8_a_drafters_window_does_not_shorten_what_the_target_loads(start, model, plain, tmp_path):
    options = speculating(drafters.save_windowed_eagle3(tmp_path / "drafter", model), "eagle3")
    wanted = prompt(1)
    expected = plain.generate(wanted)
    first = start(connector(disk(tmp_path / "root")), **options)
    assert first.store(wanted) == expected
    first.call("settle")
    assert first.close() == 0
    second = start(connector(disk(tmp_path / "root")), **options)
    assert second.call("generate", prompts=[wanted]) == [{"tokens": expected[0], "cached": 10 * BLOCK}]
    assert second.close() == 0


def test_v8_a_draft_model_with_a_window_is_refused_because_vllm_itself_answers_wrong(
    start, model, plain, tmp_path
):
    options = speculating(drafters.save_windowed(tmp_path / "drafter", model))
    wanted = [prompt(seed) for seed in (1, 2)]
    with pytest.raises(EngineError, match="over the model's own KV"):
        start(connector(disk(tmp_path / "root")), **options)
    alone = start(**options)
    assert alone.generate(*wanted, max_tokens=2 * BLOCK) != plain.generate(*wanted, max_tokens=2 * BLOCK)
    assert alone.close() == 0


def test_v8_engines_with_and_without_proposals_from_the_text_share_a_disk(start, plain, tmp_path):
    wanted = prompt(1)
    expected = plain.generate(wanted)
    transfer = connector(disk(tmp_path / "root"))
    first = start(transfer, speculative_config=NGRAM)
    assert first.store(wanted) == expected
    assert first.call("settle")["stored"] == {"disk": 10}
    assert first.close() == 0
    second = start(transfer)
    assert second.generate(wanted) == expected
    assert second.call("settle")["hits"] == {"disk": 10}
    assert second.close() == 0
