"""A start that fails leaves nothing behind in its process: the right one after it works (R9)."""

import uuid
from typing import Any

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt
from tests.vllm.test_bridge import ROOT, tiering

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def test_r9_a_right_start_after_refused_ones_in_one_process_works(start, tmp_path, plain):
    name = {"engine_id": f"always the same {uuid.uuid4()}"}
    right = connector(disk(tmp_path), kvtier_open_timeout="5s") | name
    by_scheduler: dict[str, Any] = {"prefix_caching_hash_algo": "xxhash"}
    too_large = connector(disk(tmp_path, pool="1000TiB")) | name
    by_worker: dict[str, Any] = {"kv_transfer_config": too_large}
    engine = start(right, refused_first=[by_scheduler, by_worker, by_scheduler])
    refusals = engine.call("refused_starts")
    assert "'xxhash' is not cryptographic" in refusals[0]["said"]
    assert "does not fit" in refusals[1]["said"]
    assert "'xxhash' is not cryptographic" in refusals[2]["said"]
    for refusal in refusals:
        assert refusal["threads"] == refusal["files"] == refusal["shared"] == []
    wanted = prompt(1)
    assert engine.store(wanted) == plain.generate(wanted)

    another = engine.call("start_another")["said"]
    assert "this process has the connector of the engine" in another
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=1" in another
    assert engine.call("reset")
    assert engine.generate(wanted) == plain.generate(wanted)
    assert engine.call("settle")["hits"] == {"pool": 10}
    assert engine.close() == 0


def test_r9_the_same_behind_vllms_own_tiering(start, tmp_path, plain):
    name = {"engine_id": str(uuid.uuid4())}
    right = tiering(tmp_path / "right", kvtier_identity="tiny") | name
    (tmp_path / "no directory").touch()
    wrong: dict[str, Any] = {"kv_transfer_config": tiering(tmp_path / "no directory") | name}
    engine = start(right, environment={"PYTHONPATH": str(ROOT)}, refused_first=[wrong])
    (refusal,) = engine.call("refused_starts")
    assert "no directory" in refusal["said"]
    assert refusal["threads"] == refusal["files"] == refusal["shared"] == []
    wanted = prompt(1)
    assert engine.generate(wanted) == plain.generate(wanted)
    assert engine.close() == 0
