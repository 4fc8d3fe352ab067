"""Pages under SGLang's names, in a real pool with real and fault-injecting tiers: right bytes, or none."""

import json
from types import SimpleNamespace

import pytest
import torch

from kvtier_core.engine import get_offload_group_idx
from kvtier_sglang import cache as cache_module
from kvtier_sglang.cache import NamedBlocks
from kvtier_sglang.figures import Figures
from kvtier_sglang.pages import as_pages, page_numbers
from tests.sglang.paged import HERE, PATIENCE_S, THERE, chain, evict_pool


def test_pages_come_from_the_pool_and_in_a_new_process_from_disk(open_on_disk):
    names = chain("prompt", 10)
    first = open_on_disk()
    assert first.load("a", names, THERE) == 0
    assert first.store(names, HERE) is True
    assert first.load("b", names, THERE) == 10
    assert first.load("c", [*names[:4], *chain("else", 6)], THERE) == 4
    assert first.cache.flush(PATIENCE_S)
    first.cache.close(PATIENCE_S)
    again = open_on_disk()
    assert again.load("a", names, THERE) == 10
    assert open_on_disk(weights="others").load("a", names, THERE) == 0


def test_a_tail_alone_is_looked_up_behind_what_the_device_has(open_on_disk):
    engine, names = open_on_disk(), chain("prompt", 10)
    assert engine.store(names, HERE)
    assert engine.load("a", names[6:], THERE[6:]) == 4


def test_flipped_bits_on_disk_are_found_before_a_load_is_promised(open_on_disk, tmp_path):
    names = chain("prompt", 10)
    engine = open_on_disk()
    assert engine.store(names, HERE)
    assert engine.cache.flush(PATIENCE_S)
    engine.cache.close(PATIENCE_S)
    for file in (tmp_path / "tier").rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 16:
            data = bytearray(file.read_bytes())
            data[1000::997] = bytes(byte ^ 1 for byte in data[1000::997])
            file.write_bytes(data)
    engine = open_on_disk()
    assert engine.load("a", names, THERE) == 0
    assert engine.load("b", names, THERE) == 0
    assert engine.store(names, HERE) is True
    assert engine.load("c", names, THERE) == 10


@pytest.mark.parametrize(("on_reset", "expected"), [("all", 0), ("pool", 10)])
def test_a_reset_forgets_the_tiers_as_the_settings_say(open_on_disk, on_reset, expected):
    engine, names = open_on_disk(on_reset=on_reset), chain("prompt", 10)
    assert engine.store(names, HERE)
    assert engine.cache.flush(PATIENCE_S)
    engine.cache.reset(everywhere=False)
    assert engine.load("a", names, THERE) == expected


def test_c34_after_new_weights_no_tier_answers_whatever_the_settings_say(open_on_disk):
    engine, names = open_on_disk(on_reset="pool"), chain("prompt", 10)
    assert engine.store(names, HERE)
    assert engine.cache.flush(PATIENCE_S)
    engine.cache.reset(everywhere=True)
    assert engine.load("a", names, THERE) == 0


def test_a_reset_takes_back_what_was_offered_and_not_acknowledged(open_on_disk):
    engine, names = open_on_disk(on_reset="pool"), chain("prompt", 10)
    engine.cache.store([NamedBlocks(names, HERE)])
    engine.cache.reset(everywhere=False)
    assert engine.cache.poll() == 0
    assert engine.load("a", names, THERE) == 0


def test_offers_are_acknowledged_in_their_order(open_on_disk):
    engine = open_on_disk()
    for number in range(3):
        names = chain(f"prompt {number}", 3)
        engine.cache.store([NamedBlocks(names, HERE[3 * number : 3 * number + 3])])
    acknowledged = 0
    while acknowledged < 3:
        for _ in range(engine.cache.poll()):
            assert engine.cache.pop_stored()
            acknowledged += 1
    assert engine.cache.poll() == 0


def test_of_more_pages_than_the_pool_has_rows_the_first_are_kept_and_sglang_hears_that_not_all_are(
    open_on_disk,
):
    engine, names = open_on_disk(rows=4), chain("prompt", 10)
    assert not engine.store(names, HERE)
    assert 0 < max(engine.cache.lookup("a", names)) < 10


def test_a_tier_that_has_not_said_what_it_holds_is_waited_for_in_the_first_lookup(open_faulty, tier):
    first, names = open_faulty(), chain("prompt", 10)
    assert first.store(names, HERE)
    assert first.cache.flush(PATIENCE_S)
    engine = open_faulty()
    tier[1].blocks = tier[0].blocks  # what was stored by another process
    assert engine.load("a", names, THERE) == 10
    assert engine.load("b", chain("unknown", 10), THERE) == 0


def test_wrong_bytes_of_a_tier_are_never_loaded(open_faulty, tier):
    engine, names = open_faulty(rows=16), chain("prompt", 10)
    assert engine.store(names, HERE)
    evict_pool(engine)
    tier[0].corrupt = True
    assert engine.load("a", names, THERE) == 0
    tier[0].corrupt = False
    assert engine.load("b", names, THERE) == 0  # the damaged ones were forgotten


def test_a_load_that_comes_too_late_is_refused_and_nothing_more_is_promised_until_it_has_come(
    open_faulty, tier
):
    engine, names = open_faulty(rows=32, load_patience_s=0.2), chain("prompt", 10)
    others = chain("others", 10)
    assert engine.store(names, HERE)
    assert engine.store(others, HERE)
    evict_pool(engine)
    tier[0].hold.add("load")
    assert engine.load("a", names, THERE) == 0
    assert not engine.cache.lookup("b", names)
    assert not engine.cache.lookup("c", others)
    tier[0].hold.clear()
    tier[0].release()
    assert engine.cache.flush(PATIENCE_S)
    assert engine.load("d", names, THERE) == 10


def test_after_a_load_that_came_too_late_no_shorter_prompt_is_promised_whose_windows_a_tier_has(
    open_faulty, tier, monkeypatch
):
    """Ranks may agree on any length that each of them promises."""
    engine, names = open_faulty(("full", "swa")), chain("prompt", 10)
    others = chain("others", 10)
    assert engine.store(names, HERE)
    assert engine.store(others, HERE)
    evict_pool(engine)
    assert engine.load("a", names, THERE) == 10
    assert engine.cache.lookup("b", names) == [*range(1, 11)], (
        "the pool has all pages, and three of the windows"
    )
    tier[0].hold.add("load")
    monkeypatch.setattr(cache_module, "_LOAD_PATIENCE_S", 0.2)
    assert engine.load("c", others, THERE) == 0
    assert engine.cache.lookup("d", names) == [10]


def test_a_tier_that_fails_costs_hits_alone(open_faulty, tier):
    engine, names = open_faulty(rows=16), chain("prompt", 10)
    tier[0].raise_in["submit_store"] = OSError("no space")
    assert engine.store(names, HERE) is True
    assert engine.load("a", names, THERE) == 10
    tier[0].raise_in["submit_load"] = tier[0].raise_in["lookup"] = OSError("gone")
    for number in range(16):
        engine.store(chain(f"other {number}", 10), HERE)
    assert engine.load("b", names, THERE) == 0


def test_figures_count_hits_by_source_and_say_whether_all_has_settled(open_faulty, tier):
    engine, names = open_faulty(), chain("prompt", 10)
    tier[0].hold.add("store")
    assert engine.store(names, HERE)
    assert engine.load("a", names, THERE) == 10
    assert not engine.cache.figures()["is_settled"]
    tier[0].hold.clear()
    tier[0].release()
    assert engine.cache.flush(PATIENCE_S)
    figures = engine.cache.figures()
    assert figures["is_settled"]
    assert figures["hit_blocks"] == {"pool": 10}
    assert figures["tiers"]["one"]["stored_blocks"] == 10
    said = SimpleNamespace(internal_state={"sglang": "its own"})
    shown = Figures()
    shown.add(said, "controller", recv_req="request")
    assert said.internal_state == {"sglang": "its own"}
    shown.read = engine.cache.figures
    shown.add(said, "controller", recv_req="request")
    assert said.internal_state == {"sglang": "its own", "kvtier": figures}
    assert json.loads(json.dumps(figures)) == figures


def test_requests_that_are_not_asked_for_any_more_are_forgotten(open_on_disk, monkeypatch):
    engine, names = open_on_disk(), chain("prompt", 10)
    assert engine.store(names, HERE)
    now = [1000.0]
    monkeypatch.setattr(engine.cache, "_clock", lambda: now[0])
    for number in range(5):
        assert list(engine.cache.lookup(f"request {number}", names)) == [*range(1, 11)]
        now[0] += 30
    engine.cache.poll()
    assert list(engine.cache._asked) == ["request 3", "request 4"]
    assert len(engine.cache._manager.coordinator.state.requests) == 2


ALL = ("full", "swa", "mamba")


def _blocks(names: list[str], *lasts: int) -> list[NamedBlocks]:
    """Blocks at the ends of all pages, and of so many of the last ones in each of the other groups."""
    counts = [len(names), *lasts]
    return [
        NamedBlocks(names[len(names) - count :], HERE[len(names) - count : len(names)], group)
        for group, count in enumerate(counts)
    ]


def test_a_prompt_can_be_restored_up_to_where_its_windows_and_a_state_were_kept(open_on_disk):
    names = chain("prompt", 10)
    first = open_on_disk(ALL)
    assert first.store_blocks(_blocks(names[:4], 4, 1))  # a node of SGLang's tree, and the next one
    assert first.store_blocks(
        [
            NamedBlocks(names[4:], HERE[4:]),
            NamedBlocks(names[7:], HERE[7:], 1),
            NamedBlocks(names[9:], HERE[9:], 2),
        ]
    )
    assert first.cache.lookup("a", names) == [4, 10]
    assert first.cache.lookup("b", names[:9]) == [4]
    assert first.cache.lookup("c", names[:3]) == []
    assert first.load("d", names, THERE) == 10
    assert first.load("e", [*names[:5], *chain("else", 5)], THERE) == 4
    assert first.cache.flush(PATIENCE_S)
    first.cache.close(PATIENCE_S)
    again = open_on_disk(ALL)
    assert again.cache.lookup("a", names) == [4, 10]
    assert again.load("a", names, THERE) == 10


def test_a_window_alone_ends_anywhere_behind_its_pages(open_on_disk):
    engine, names = open_on_disk(("full", "swa")), chain("prompt", 10)
    assert engine.store_blocks(_blocks(names, 5))
    assert engine.cache.lookup("a", names) == [8, 9, 10]
    assert engine.load("a", names, THERE) == 10
    assert engine.load("b", names[6:], THERE[6:]) == 4, "the device has what lies before"


@pytest.mark.parametrize("component", [1, 2])
def test_what_a_component_lacks_costs_the_prompt(open_faulty, tier, component):
    """Wrong bytes of a window or a state are as bad as those of a page."""
    engine, names = open_faulty(ALL, rows=32), chain("prompt", 10)
    assert engine.store_blocks(_blocks(names, 3, 1))
    evict_pool(engine)
    kept = tier[0].blocks[tier[0].namespace]
    wrong = {key: bytes(len(block)) for key, block in kept.items() if get_offload_group_idx(key) == component}
    right = {key: kept[key] for key in wrong}
    kept.update(wrong)
    assert engine.load("a", names, THERE) == 0
    kept.update(right)
    assert engine.cache.lookup("b", names) == []  # the damaged ones were forgotten


def test_slots_that_are_no_pages_are_refused():
    assert page_numbers(torch.arange(8, 16), 4) == [2, 3]
    for slots in (torch.arange(3), torch.arange(1, 5), torch.tensor([4, 5, 7, 6])):
        with pytest.raises(ValueError, match="pages"):
            page_numbers(slots, 4)
    with pytest.raises(ValueError, match="whole pages"):
        as_pages([torch.zeros(10, 2, 8)], 4)
