"""Weights that a client exchanges in a running engine: what was made by the old ones is never an answer (C02)."""

import shutil

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt, save_adapter, save_tiny_model

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def other_plain(start, other_model):
    return start(model=other_model, enable_prefix_caching=False)


def exchange(model, other):
    shutil.copy(other / "model.safetensors", model / "model.safetensors")


@pytest.mark.parametrize("processes", [1, 2])
def test_v4_c02_reloaded_weights_get_no_kv_of_the_old_ones_and_leave_none_for_them(
    start, model, other_model, plain, other_plain, tmp_path, processes
):
    wanted, later = prompt(1), prompt(2)
    before, after = plain.generate(wanted, later), other_plain.generate(wanted, later)
    mine = shutil.copytree(model, tmp_path / "model")
    settings = connector(disk(tmp_path / "root"))
    engine = start(settings, model=mine, processes=processes)
    assert engine.store(wanted) == before[:1]
    exchange(mine, other_model)
    engine.call("rpc", method="reload_weights")
    engine.call("reset")  # of vLLM's own cache alone
    assert engine.store(wanted, later) == after
    engine.call("reset")
    assert engine.generate(wanted, later) == after
    assert "weights have changed" in engine.log()
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


LORA = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def lora_plain(start):
    return start(enable_prefix_caching=False, **LORA)


@pytest.fixture(scope="module")
def lora_engine(start):
    return start(connector({"pool": {"capacity": "4MiB"}}), **LORA)


@pytest.mark.parametrize("way", ["load_inplace", "a request that says so", "unloaded", "another number"])
def test_r8_c02_an_adapter_that_is_loaded_again_gets_no_kv_of_the_one_before(
    lora_engine, lora_plain, tmp_path, way
):
    wanted = prompt(10)
    number = 1 + ["load_inplace", "a request that says so", "unloaded", "another number"].index(way)
    adapter = {"name": "mine", "number": number, "path": str(tmp_path / "adapter")}
    expected = []
    for seed in (1, 2):
        save_adapter(tmp_path / "adapter", seed=seed)
        # The plain engine reads each one from a place of its own.
        save_adapter(tmp_path / f"plain{seed}", seed=seed)
        plain = {
            "name": f"{way} {seed}",
            "number": 10 * number + seed,
            "path": str(tmp_path / f"plain{seed}"),
        }
        expected.append(lora_plain.generate(wanted, adapter=plain))
    assert expected[0] != expected[1]
    save_adapter(tmp_path / "adapter", seed=1)
    assert lora_engine.generate(wanted, adapter=adapter) == expected[0]
    lora_engine.call("settle")
    assert lora_engine.call("reset")
    hits = lora_engine.call("books")["hits"].get("pool", 0)
    assert lora_engine.generate(wanted, adapter=adapter) == expected[0]
    assert lora_engine.call("books")["hits"]["pool"] == hits + 10, "the same adapter goes on to hit"
    save_adapter(tmp_path / "adapter", seed=2)
    if way == "load_inplace":
        lora_engine.call("load_adapter", **adapter, in_place=True)
    elif way == "a request that says so":
        adapter["in_place"] = True
    elif way == "unloaded":
        lora_engine.call("unload_adapter", number=number)
    else:
        adapter["number"] = 100
    assert lora_engine.call("reset")
    assert lora_engine.generate(wanted, adapter=adapter) == expected[1]
