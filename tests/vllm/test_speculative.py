"""Speculative decoding that has no draft model, with a disk: what is accepted is stored, what is not never is (V8)."""

import random

import pytest

from tests.vllm.engines import BLOCK, connector, disk, needs_vllm
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
