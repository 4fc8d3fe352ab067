"""An SGLang whose pages kvtier reads otherwise than SGLang itself is refused at the start (C05)."""

from types import SimpleNamespace

import pytest
import torch

from kvtier_core import UnsupportedModelError
from kvtier_sglang.canary import check_pages
from tests.sglang.paged import PAGES, PATIENCE_S, TOKENS, Engine, open_with_disk


@pytest.fixture
def engine(tmp_path):
    engine = open_with_disk(tmp_path)
    yield engine
    engine.cache.close(PATIENCE_S)


def _kv_pool(keys: list[torch.Tensor], values: list[torch.Tensor]) -> SimpleNamespace:
    return SimpleNamespace(
        model_layer_ids=range(len(keys)), get_key_buffer=keys.__getitem__, get_value_buffer=values.__getitem__
    )


def test_c05_pages_are_tried_at_the_start_and_reach_no_tier(engine: Engine, tmp_path):
    kv_pool = _kv_pool(engine.buffers[:3], engine.buffers[3:])
    check_pages(engine.cache, kv_pool, TOKENS)
    assert not any(bool(buffer.any()) for buffer in engine.buffers)
    assert engine.cache.flush(PATIENCE_S)
    assert engine.cache._manager.figures()["tiers"]["disk"]["stored_blocks"] == 0


def test_c05_an_sglang_that_reads_other_bytes_than_kvtier_is_refused(engine: Engine):
    by_head = [buffer.view(2, PAGES * TOKENS, 8).transpose(0, 1) for buffer in engine.buffers]
    with pytest.raises(UnsupportedModelError, match="not what SGLang had written"):
        check_pages(engine.cache, _kv_pool(by_head[:3], by_head[3:]), TOKENS)


def test_c05_too_little_memory_to_try_is_named(engine: Engine):
    few = [buffer[: 2 * TOKENS] for buffer in engine.buffers]
    with pytest.raises(UnsupportedModelError, match="max_total_tokens"):
        check_pages(engine.cache, _kv_pool(few[:3], few[3:]), TOKENS)
