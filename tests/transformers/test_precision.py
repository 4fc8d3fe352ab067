"""Models in half the precision: a restored prompt answers as one whose KV stayed on the device."""

import pytest
import torch
from transformers import DynamicCache

from kvtier_transformers import Engine
from kvtier_transformers.decoding import GreedyDecoder
from tests.transformers.tiny import save_model, tiny_model, tokens, write_settings

HELD, NEW = 96, 12
PROMPT = tokens(100)


def from_the_device(model):
    """Tokens and first logits when the first tokens are computed in a forward pass of their own, and stay."""
    cache = DynamicCache(config=model.config)
    decoder = GreedyDecoder(model, cache, chunk_tokens=HELD, on_progress=lambda _: None)
    decoder.prefill(PROMPT[:HELD])
    logits = first = decoder.prefill(PROMPT)
    found = [int(logits.argmax())]
    while len(found) < NEW:
        found.append(int(decoder.step(found[-1]).argmax()))
    return tuple(found), first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c40_restored_kv_gives_what_kept_kv_gives(tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    directory = save_model(tiny_model().to(dtype), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype="auto").eval()
    assert model.dtype == dtype
    expected, first = from_the_device(model)
    config = write_settings(tmp_path)
    for source in ("pool", "disk"):
        with Engine.open(model, config=config, max_tokens=128, chunk_tokens=HELD) as engine:
            if source == "pool":
                engine.generate(PROMPT, max_tokens=1)
                assert engine.flush(60)
            again = engine.generate(PROMPT, max_tokens=NEW)
        assert again.hits_by_tier == {source: HELD}
        assert again.token_ids == expected
        torch.testing.assert_close(again.first_logits, first, atol=0.02, rtol=0.02)
