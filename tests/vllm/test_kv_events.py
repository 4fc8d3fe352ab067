"""vLLM's publisher is told what kvtier's pool and tiers hold: a replay gives their contents (C16, C61)."""

from collections import defaultdict

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def test_c16_c61_events_replay_into_pool_and_disk(start, tmp_path):
    engine = start(
        connector(disk(tmp_path, pool="1MiB", layout="files")),  # 28 rows, and a file a block
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )
    engine.call("note_events")
    for number in range(6):
        engine.store(prompt(number, blocks=5))
        engine.call("settle")
    for number in range(3):  # each step tells what has changed by then
        engine.generate([1, 2, number + 1])
    contents = defaultdict(set)
    for kind, medium, hashes in engine.call("noted_events"):
        if kind == "BlockStored":
            contents[medium].update(hashes)
        else:
            assert kind == "BlockRemoved"
            assert contents[medium].issuperset(hashes)
            contents[medium].difference_update(hashes)
    in_pool = set(engine.call("hashes_in_pool"))
    on_disk = {str(int(file.stem[48:64], 16)) for file in tmp_path.rglob("*.kv")}
    assert len(in_pool) == 28
    assert len(on_disk) == 30
    assert contents["CPU"] == in_pool
    assert contents["STORAGE"] == on_disk
    engine.close()
