"""Weights that a client exchanges in a running engine: what was made by the old ones is never an answer (C02)."""

import shutil
import time

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt
from tests.vllm.models import save_tiny_model

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def other_plain(start, other_model):
    return start(model=other_model, enable_prefix_caching=False)


def exchange(model, other):
    shutil.copy(other / "model.safetensors", model / "model.safetensors")
    outlast_a_tick()


def outlast_a_tick():
    """A process's beginning is known to 10 ms: weights that are written so shortly before it are in doubt."""
    time.sleep(0.05)


@pytest.mark.parametrize("processes", [1, 2])
def test_v4_c02_reloaded_weights_get_no_kv_of_the_old_ones_and_leave_none_for_them(
    start, model, other_model, plain, other_plain, tmp_path, processes
):
    wanted, later = prompt(1), prompt(2)
    before, after = plain.generate(wanted, later), other_plain.generate(wanted, later)
    mine = shutil.copytree(model, tmp_path / "model")
    outlast_a_tick()
    settings = connector(disk(tmp_path / "root"))
    engine = start(settings, model=mine, processes=processes)
    assert engine.store(wanted) == before[:1]
    exchange(mine, other_model)
    engine.call("rpc", method="reload_weights")
    engine.call("reset")  # of vLLM's own cache alone
    assert engine.store(wanted, later) == after
    engine.call("reset")
    assert engine.generate(wanted, later) == after
    assert "collective_rpc('reload_weights') has changed weights" in engine.log()
    assert engine.close() == 0
    exchange(mine, model)
    again = start(settings, model=mine)
    assert again.generate(wanted, later) == before
    assert again.call("books")["hits"].get("disk", 0) == 10, "what the old weights made is still theirs"


def test_v4_a_call_that_changes_no_weight_costs_no_hit(start, tmp_path, plain):
    wanted = prompt(3)
    expected = plain.generate(wanted)
    engine = start(connector(disk(tmp_path)))
    assert engine.store(wanted) == expected
    engine.call("rpc", method="check_health")
    assert engine.call("reset")
    assert engine.generate(wanted) == expected
    assert engine.call("books")["hits"] == {"pool": 10}


@pytest.mark.parametrize("on_reset", ["all", "pool"])
def test_v4_sleep_that_throws_the_weights_away_leaves_everything_behind(start, tmp_path, plain, on_reset):
    wanted = prompt(4)
    expected = plain.generate(wanted)
    settings = connector(disk(tmp_path, on_reset=on_reset))
    engine = start(settings)
    assert engine.store(wanted) == expected
    engine.call("sleep", level=1)
    assert engine.generate(wanted) == expected
    first = engine.call("books")["hits"]
    assert sum(first.values()) == (10 if on_reset == "pool" else 0)
    engine.call("sleep", level=2)
    assert engine.store(wanted) == expected, "a CPU keeps the weights"
    assert engine.call("books")["hits"] == first
    assert "sleep of level 2 throws the weights away" in engine.log()
    assert engine.close() == 0
