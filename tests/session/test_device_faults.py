"""Device transfers that fail or never begin: nothing stays pinned or is claimed, what failed is offered again."""

from collections import deque

import pytest

from tests.session.toy import PATIENCE_S

PROMPT = list(range(1, 18))
IDS = list(range(5))


def counted(session):
    stats = session.stats()
    return stats["hit_tokens"], stats["pool"]["loaded_blocks"]


def test_k5_o4_k14_o1_a_failed_device_load_counts_for_nothing(make_toy):
    toy = make_toy()
    toy.run("a", PROMPT)
    session = toy.session
    session.begin("b", PROMPT)
    session.load("b", session.wait_matched("b", PATIENCE_S), [0, 1, 2, 999])
    assert session.wait_loaded("b", PATIENCE_S) == 0
    assert counted(session) == ({}, 0)
    session.load("b", session.wait_matched("b", PATIENCE_S), IDS)
    assert session.wait_loaded("b", PATIENCE_S) == 16
    assert counted(session) == ({"pool": 16}, 4)
    assert session.request_hits("b") == {"pool": 16}
    session.end("b")


def test_c13_a_load_that_does_not_begin_pins_nothing_and_claims_nothing(make_toy, monkeypatch):
    toy = make_toy()
    toy.run("a", PROMPT)
    session = toy.session
    assert session.flush(PATIENCE_S)

    def refuse(*_args, **_kwargs):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(session._device, "submit", refuse)
        session.begin("b", PROMPT)
        with pytest.raises(RuntimeError, match="the device is gone"):
            session.load("b", session.wait_matched("b", PATIENCE_S), IDS)
    assert session.wait_loaded("b", PATIENCE_S) == 0
    session.end("b")
    assert session.flush(PATIENCE_S), "a job of the load is left"
    assert session._manager.coordinator.state.ledger.room == 16


def test_block_ids_may_be_any_sequence(make_toy):
    toy = make_toy()
    toy.run("a", PROMPT)
    session = toy.session
    session.begin("b", PROMPT)
    session.load("b", session.wait_matched("b", PATIENCE_S), deque(IDS))
    assert session.wait_loaded("b", PATIENCE_S) == 16
    assert toy.holds(PROMPT, IDS, 16)
    session.end("b")


def test_c12_blocks_whose_device_store_failed_are_offered_again(make_toy):
    toy = make_toy()
    session = toy.session
    session.begin("a", PROMPT)
    toy.compute(PROMPT, IDS)
    session.computed("a", 17, [0, 1, 2, 999, 4])  # no such device block
    assert session.wait_stored("a", PATIENCE_S)
    session.computed("a", 17, IDS)
    session.end("a")
    assert session.wait_stored("a", PATIENCE_S)
    toy.wipe()
    assert toy.run("b", PROMPT) == 16


def test_c28_a_tier_that_takes_less_than_an_eighth_of_the_pool_is_not_waited_for_in_vain(make_toy):
    long = list(range(1, 4 * 40 + 2))
    toy = make_toy(num_rows=80, num_blocks=41, max_cascade=0.1)
    session = toy.session
    session.begin("a", long)
    toy.compute(long, list(range(41)))
    session.computed("a", len(long), list(range(41)), wait_s=PATIENCE_S)
    session.end("a")
    assert session.flush(PATIENCE_S)
    tier = session.stats()["tiers"]["one"]
    assert (tier["stored_blocks"], tier["dropped_blocks"]) == (40, 0)


def test_c34_a_request_that_looks_up_after_the_reset_is_stored(make_toy):
    toy = make_toy()
    session = toy.session
    session.begin("a", PROMPT)
    session.reset_cache()
    assert session.wait_matched("a", PATIENCE_S) == 0
    toy.compute(PROMPT, IDS)
    session.computed("a", 17, IDS)
    session.end("a")
    assert session.wait_stored("a", PATIENCE_S)
    toy.wipe()
    assert toy.run("b", PROMPT) == 16


def test_c34_a_lookup_in_the_middle_of_a_request_does_not_make_its_kv_new(make_toy):
    toy = make_toy()
    session = toy.session
    session.begin("a", PROMPT)
    toy.compute(PROMPT, IDS)
    session.computed("a", 4, IDS)
    session.reset_cache()
    session.match("a")
    session.computed("a", 17, IDS)
    session.end("a")
    assert session.flush(PATIENCE_S)
    assert toy.run("b", PROMPT) == 0


def test_a_pool_without_a_tier_serves(make_toy):
    toy = make_toy(())
    assert toy.run("a", PROMPT) == 0
    assert toy.run("b", PROMPT) == 16
    assert toy.session.flush(PATIENCE_S)
