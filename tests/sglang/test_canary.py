"""An SGLang whose pages kvtier reads otherwise than SGLang itself is refused at the start (C05)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier_core import UnsupportedModelError
from kvtier_sglang.cache import NamedBlocks
from kvtier_sglang.canary import check_blocks
from tests.sglang import paged
from tests.sglang.paged import PAGES, PATIENCE_S, TOKENS, Engine, open_with_disk


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = open_with_disk(tmp_path, "full", "swa", "mamba")
    yield engine
    engine.cache.close(PATIENCE_S)


def test_c05_blocks_are_tried_at_the_start_and_reach_no_tier(engine: Engine):
    check_blocks(engine.cache, engine.parts)
    assert not any(bool(buffer.any()) for part in engine.parts for buffer in part.read())
    assert engine.cache.flush(PATIENCE_S)
    assert engine.cache._manager.figures()["tiers"]["disk"]["stored_blocks"] == 0


@pytest.mark.parametrize("component", [0, 1, 2])
def test_c05_an_sglang_that_reads_other_bytes_than_kvtier_is_refused(engine: Engine, component: int):
    parts = list(engine.parts)
    slots = PAGES * parts[component].slots
    by_head = [buffer.view(2, slots, 8).transpose(0, 1) for buffer in parts[component].read()]
    parts[component] = replace(parts[component], read=lambda: by_head)
    with pytest.raises(UnsupportedModelError, match="not what SGLang had written"):
        check_blocks(engine.cache, parts)


@pytest.mark.parametrize("tokens", [TOKENS, 15], ids=["64 numbers", "240 numbers"])
def test_c05_one_block_in_the_place_of_another_is_refused(tmp_path: Path, monkeypatch, tokens: int):
    """However many numbers a block has."""
    monkeypatch.setattr(paged, "make_parts", lambda _: [paged._part("kv", 6, tokens)])
    engine = open_with_disk(tmp_path)
    load = engine.cache.load
    monkeypatch.setattr(
        engine.cache, "load", lambda name, blocks: load(name, [NamedBlocks(blocks[0].names, [4, 3])])
    )
    with pytest.raises(UnsupportedModelError, match="not what SGLang had written"):
        check_blocks(engine.cache, engine.parts)
    assert engine.cache.close(PATIENCE_S)


@pytest.mark.parametrize(
    ("component", "named"),
    [(1, "'swa': set max_total_tokens"), (2, "'mamba': set max_mamba_cache_size")],
)
def test_c05_too_little_memory_to_try_is_named(engine: Engine, component: int, named: str):
    parts = list(engine.parts)
    few = [buffer[: 2 * parts[component].slots] for buffer in parts[component].read()]
    parts[component] = replace(parts[component], read=lambda: few)
    with pytest.raises(UnsupportedModelError, match=named):
        check_blocks(engine.cache, parts)
