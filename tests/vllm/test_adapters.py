"""LoRA adapters in real vLLM: what one content of their files made is never an answer of another (C02)."""

from pathlib import Path

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt
from tests.vllm.models import save_adapter, until_settled
from tests.vllm.test_bridge import tiering

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
"""vLLM keeps one adapter, and reads the one before again when it is asked for."""


@pytest.fixture(scope="module")
def right(start, tmp_path_factory):
    """What an adapter with these weights says, from an engine without connector, which sees each file once."""
    engine = start(enable_prefix_caching=False, **LORA)
    directory = tmp_path_factory.mktemp("right")

    def ask(wanted, seed):
        path = save_adapter(directory / f"{seed}", seed=seed)
        return engine.generate(wanted, adapter=named(path, number=seed))

    return ask


@pytest.fixture(scope="module")
def engine(start):
    return start(connector({"pool": {"capacity": "32MiB"}}), **LORA)


def named(path, *, number):
    return {"name": path.name, "number": number, "path": str(path)}


def saved(path, *, seed):
    """An adapter, old enough for its times to tell when it changes."""
    save_adapter(path, seed=seed)
    until_settled(path)
    return path


def used(engine, path, *, number):
    """The adapter, once its files have been read: from then on its blocks are stored."""
    adapter = named(path, number=number)
    before = engine.call("settle")["blocks"]
    for seed in range(1000, 1100):
        engine.generate(prompt(seed, blocks=1), adapter=adapter)
        if engine.call("settle")["blocks"] > before:
            return adapter
    raise AssertionError(engine.log()[-3000:])


def hits(engine, source="pool"):
    return engine.call("settle")["hits"].get(source, 0)


def test_r8_v8_the_same_adapter_goes_on_to_hit(engine, right, tmp_path):
    mine, wanted = used(engine, saved(tmp_path / "mine", seed=1), number=901), prompt(1)
    expected = right(wanted, 1)
    assert engine.generate(wanted, adapter=mine) == expected
    before = hits(engine)
    assert engine.call("reset")
    assert engine.generate(wanted, adapter=mine) == expected
    assert hits(engine) == before + 10


def again(engine, adapter, other):
    """vLLM evicts the adapter and reads it again by itself."""
    engine.generate(prompt(99, blocks=1), adapter=other)
    return adapter


def load_in_place(engine, adapter, other):
    engine.call("load_adapter", **adapter, in_place=True)
    return adapter


def ask_in_place(engine, adapter, other):
    return {**adapter, "in_place": True}


def unload(engine, adapter, other):
    engine.call("unload_adapter", number=adapter["number"])
    return adapter


def renumber(engine, adapter, other):
    return {**adapter, "number": adapter["number"] + 100}


@pytest.mark.parametrize("way", [again, load_in_place, ask_in_place, unload, renumber])
@pytest.mark.parametrize("linked", [False, True], ids=["exchanged", "a link that turns"])
def test_r8_c02_an_adapter_whose_files_have_changed_gets_no_kv_of_the_ones_before(
    engine, right, tmp_path, way, linked
):
    wanted = prompt(10)
    path, other = tmp_path / "adapter", named(saved(tmp_path / "other", seed=3), number=800)
    if linked:
        for seed in (1, 2):
            saved(tmp_path / f"{seed}", seed=seed)
        path.symlink_to(tmp_path / "1")
    else:
        saved(path, seed=1)
    number = 1 + [again, load_in_place, ask_in_place, unload, renumber].index(way) + 10 * linked
    adapter, other["number"] = used(engine, path, number=number), 800 + number
    assert engine.generate(wanted, adapter=adapter) == right(wanted, 1)
    hits(engine)
    if linked:
        path.unlink()
        path.symlink_to(tmp_path / "2")
    else:
        save_adapter(path, seed=2)
    adapter = way(engine, adapter, other)
    assert engine.call("reset")  # of vLLM's own cache alone
    assert engine.generate(wanted, adapter=adapter) == right(wanted, 2)
    assert right(wanted, 1) != right(wanted, 2)


def test_v8_c02_adapters_are_served_from_disk_by_what_their_files_hold(start, right, tmp_path):
    wanted, path = prompt(20), saved(tmp_path / "mine", seed=1)
    first, other = right(wanted, 1), right(wanted, 2)
    settings = connector(disk(tmp_path / "root"))
    plain = None
    for number, (seed, expected, from_disk) in enumerate(
        [(1, first, 0), (1, first, 10), (2, other, 0), (1, first, 10)], start=1
    ):
        saved(path, seed=seed)
        engine = start(settings, **LORA)
        mine = used(engine, path, number=number)
        before = hits(engine, "disk")
        assert engine.generate(wanted, adapter=mine) == expected
        assert hits(engine, "disk") == before + from_disk
        plain = plain or engine.generate(wanted)
        assert engine.generate(wanted) == plain, "the model alone"
        hits(engine)
        assert engine.close() == 0
    assert plain not in (first, other)


def test_r8_c02_what_vllms_own_cache_mixes_is_not_kept(engine, right, tmp_path):
    wanted = prompt(30)
    path = saved(tmp_path / "mine", seed=1)
    assert engine.generate(wanted[:170], adapter=used(engine, path, number=301)) == right(wanted[:170], 1)
    hits(engine)
    saved(path, seed=2)
    # vLLM's cache knows name and path: it goes on from what the first files made.
    engine.generate(wanted, adapter=named(path, number=302))
    hits(engine)
    assert engine.call("reset")
    assert engine.generate(wanted, adapter=named(path, number=302)) == right(wanted, 2)


def test_r8_c02_two_adapters_of_one_number_leave_nothing(engine, tmp_path, right):
    """vLLM serves the first one's weights for both, as long as it has them."""
    wanted = prompt(40)
    one, two = (saved(tmp_path / f"{seed}", seed=seed) for seed in (1, 2))
    assert engine.generate(wanted, adapter=used(engine, one, number=401)) == right(wanted, 1)
    engine.generate(wanted, adapter=named(two, number=401))
    hits(engine)
    engine.generate(prompt(99, blocks=1), adapter=named(saved(tmp_path / "other", seed=3), number=403))
    assert engine.call("reset")
    assert engine.generate(wanted, adapter=named(two, number=401)) == right(wanted, 2)


def test_r8_c02_an_adapter_that_came_by_a_call_to_the_workers_is_not_trusted(start, right, tmp_path):
    wanted, path = prompt(50), saved(tmp_path / "mine", seed=1)
    engine = start(connector({"pool": {"capacity": "4MiB"}}), **LORA)
    adapter = named(path, number=1)
    engine.call("rpc_adapter", **adapter)
    saved(path, seed=2)
    assert engine.generate(wanted, adapter=adapter) == right(wanted, 1), "it was read before that"
    assert engine.call("settle")["blocks"] == 0
    assert "collective_rpc('add_lora') has changed weights or adapters" in engine.log()
    assert engine.close() == 0


def test_v8_c02_behind_vllms_own_tiering_adapters_are_left_out(start, right, tmp_path):
    wanted, path = prompt(60), saved(tmp_path / "mine", seed=1)
    engine = start(
        tiering(tmp_path / "root", kvtier_identity="tiny"), environment={"PYTHONPATH": str(ROOT)}, **LORA
    )
    for number, seed in enumerate((1, 2), start=1):
        saved(path, seed=seed)
        assert engine.generate(wanted, adapter=named(path, number=number)) == right(wanted, seed)
        assert engine.call("settle_bridge")["stored"] == {"disk": 0}
        assert engine.call("reset", connector=True)
    engine.store(prompt(61))
    assert engine.call("settle_bridge")["stored"] == {"disk": 10}
    assert "kvtier keeps no blocks of LoRA adapters behind vLLM's own tiering" in engine.log()
    assert engine.close() == 0
