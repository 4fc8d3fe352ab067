"""HiCache's pages in a real pool with real and fault-injecting tiers: right bytes or none, and no call raises."""

import threading
import time

import pytest
import torch

from kvtier_sglang import cache as cache_module
from kvtier_sglang import hostpages
from kvtier_sglang.cache import NamedBlocks
from kvtier_sglang.hostpages import HostPages
from tests.sglang.paged import HERE, PATIENCE_S, THERE, TOKENS, Engine, chain, evict_pool

NAMES = chain("prompt", 10)


@pytest.fixture
def host():
    """Makes the storage of an engine's memory."""
    made: list[HostPages] = []

    def make(engine: Engine, is_right=lambda: True) -> HostPages:
        made.append(HostPages(engine.cache, TOKENS, is_right))
        return made[-1]

    yield make
    for each in made:
        each.close(PATIENCE_S)


def _slots(numbers) -> torch.Tensor:
    return torch.tensor([number * TOKENS + token for number in numbers for token in range(TOKENS)])


def _store(engine: Engine, host: HostPages, names, numbers) -> int:
    engine.write([NamedBlocks(names, numbers)])
    stored = host.store(names, _slots(numbers))
    engine.write([NamedBlocks(chain("another", len(numbers)), numbers)])  # HiCache gives the slots to others
    return stored


def _load(engine: Engine, host: HostPages, names, numbers=THERE) -> int:
    """How many pages came. Fails where a byte of them is wrong."""
    found = host.count(names)
    loaded = host.load(names[:found], _slots(numbers[:found])) if found else 0
    assert engine.holds([NamedBlocks(names[:loaded], numbers[:loaded])]), "wrong bytes"
    return loaded


def _until(is_so, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def _settle(host: HostPages) -> None:
    """Until the tiers have what was stored, though nobody asks."""
    _until(lambda: host.figures()["is_settled"], "the tiers did not get what was stored")


def test_pages_come_from_the_pool_and_in_a_new_process_from_disk(open_on_disk, host):
    engine = open_on_disk()
    first = host(engine)
    assert _load(engine, first, NAMES) == 0
    assert _store(engine, first, NAMES, HERE) == 10
    assert _load(engine, first, NAMES) == 10
    assert _load(engine, first, [*NAMES[:4], *chain("else", 6)]) == 4
    _settle(first)
    assert first.close(PATIENCE_S)
    engine = open_on_disk()
    assert _load(engine, host(engine), NAMES) == 10
    others = open_on_disk(weights="others")
    assert _load(others, host(others), NAMES) == 0


def test_of_damaged_pages_those_before_the_first_are_loaded(open_faulty, tier, host):
    engine = open_faulty(rows=16)
    pages = host(engine)
    assert _store(engine, pages, NAMES, HERE) == 10
    evict_pool(engine)
    blocks = tier[0].blocks[tier[0].namespace]
    damaged = next(key for key in blocks if key.startswith(bytes.fromhex(NAMES[6])))
    blocks[damaged] = bytes(byte ^ 1 for byte in blocks[damaged])
    assert pages.load(NAMES, _slots(THERE)) == 6
    assert engine.holds([NamedBlocks(NAMES[:6], THERE[:6])])
    assert _load(engine, pages, NAMES) == 6


def test_cleared_pages_answer_no_more_in_any_tier_and_others_are_stored_again(open_on_disk, host):
    engine = open_on_disk(on_reset="pool")
    pages = host(engine)
    assert _store(engine, pages, NAMES, HERE) == 10
    _settle(pages)
    assert pages.clear()
    assert _load(engine, pages, NAMES) == 0
    assert _store(engine, pages, NAMES, HERE) == 10
    assert _load(engine, pages, NAMES) == 10


def test_c34_after_new_weights_nothing_is_given_or_taken(open_on_disk, host):
    engine, is_right = open_on_disk(), [True]
    pages = host(engine, lambda: is_right[0])
    assert _store(engine, pages, NAMES[:5], HERE[:5]) == 5
    is_right[0] = False
    assert pages.count(NAMES[:5]) == 0
    assert pages.load(NAMES[:5], _slots(THERE[:5])) == 0
    assert _store(engine, pages, NAMES[5:], HERE[5:]) == 0
    assert not pages.clear()
    is_right[0] = True
    assert _load(engine, pages, NAMES) == 5


def test_a_tier_that_fails_costs_hits_alone(open_faulty, tier, host):
    engine = open_faulty(rows=16)
    pages = host(engine)
    tier[0].raise_in["submit_store"] = OSError("no space")
    assert _store(engine, pages, NAMES, HERE) == 10
    assert _load(engine, pages, NAMES) == 10
    tier[0].raise_in["submit_load"] = tier[0].raise_in["lookup"] = OSError("gone")
    for number in range(8):
        _store(engine, pages, chain(f"other {number}", 10), HERE)
    assert _load(engine, pages, NAMES) == 0


def test_a_tier_that_hangs_holds_no_call_up_for_long(open_faulty, tier, host, monkeypatch):
    engine = open_faulty(rows=32, load_patience_s=0.2)
    monkeypatch.setattr(cache_module, "_ANSWER_PATIENCE_S", 0.2)
    pages = host(engine)
    assert _store(engine, pages, NAMES, HERE) == 10
    evict_pool(engine)
    tier[0].hold.add("load")
    began = time.monotonic()
    for _ in range(3):
        assert pages.load(NAMES, _slots(THERE)) == 0
    assert time.monotonic() - began < PATIENCE_S / 2
    tier[0].hold.clear()
    tier[0].release()
    _settle(pages)
    assert _load(engine, pages, NAMES) == 10
    evict_pool(engine)
    tier[0].hold.add("load")
    assert pages.load(NAMES, _slots(THERE)) == 0
    assert pages.clear()
    tier[0].hold.clear()
    tier[0].release()


def test_a_store_waits_for_tiers_that_are_behind_for_a_while_and_the_next_does_not(
    open_faulty, tier, host, monkeypatch
):
    engine = open_faulty(rows=16)
    pages = host(engine)
    monkeypatch.setattr(hostpages, "_STORE_PATIENCE_S", 0.3)
    tier[0].hold.add("store")
    began = time.monotonic()
    assert _store(engine, pages, NAMES, HERE) == 10
    assert time.monotonic() - began >= 0.3
    monkeypatch.setattr(hostpages, "_STORE_PATIENCE_S", PATIENCE_S)
    began = time.monotonic()
    _store(engine, pages, chain("second", 10), HERE)
    assert time.monotonic() - began < PATIENCE_S / 2
    tier[0].hold.clear()
    tier[0].release()
    _settle(pages)
    assert _store(engine, pages, chain("third", 2), HERE[:2]) == 2
    _settle(pages)
    tier[0].hold.add("store")
    timer = threading.Timer(0.2, lambda: (tier[0].hold.clear(), tier[0].release()))
    timer.start()
    names = chain("fourth", 10)
    assert _store(engine, pages, names, HERE) == 10
    timer.join()
    _settle(pages)
    kept = {key[:32].hex() for key in tier[0].blocks[tier[0].namespace]}
    assert set(names) <= kept


def test_no_call_raises(open_on_disk, host, caplog):
    engine = open_on_disk()
    pages = host(engine)
    assert pages.count([]) == pages.load([], _slots([])) == pages.store([], _slots([])) == 0
    odd = _slots(HERE)[1:]
    assert pages.load(NAMES, odd) == pages.store(NAMES, odd) == 0
    assert pages.store(NAMES, _slots(HERE[:2])) == 0
    assert pages.count(["no digest"]) == 0
    assert len([record for record in caplog.records if "fault of kvtier's" in record.message]) == 4
    assert _store(engine, pages, NAMES, HERE) == 10
    pages.close(PATIENCE_S)
    assert pages.count(NAMES) == pages.load(NAMES, _slots(THERE)) == pages.store(NAMES, _slots(HERE)) == 0
    assert not pages.clear()


def test_hicaches_threads_ask_at_the_same_time(open_on_disk, host):
    engine = open_on_disk()
    pages = host(engine)
    prompts = [chain(f"prompt {number}", 10) for number in range(12)]
    loaded, faults = [], []

    def work(call):
        try:
            for names in prompts:
                call(names)
        except BaseException as fault:  # noqa: BLE001 - said by the test's own thread
            faults.append(fault)

    def load(names):
        _until(lambda: pages.count(names) == 10, "was not stored")
        loaded.append(_load(engine, pages, names))

    threads = [
        threading.Thread(target=work, args=(call,))
        for call in (lambda names: _store(engine, pages, names, HERE), load, lambda _: pages.figures())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert faults == []
    assert loaded == [10] * len(prompts)
