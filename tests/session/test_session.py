"""The engine session, from new request to finish, with real copies and threads."""

import math
import os
import threading
import time
from functools import partial

import pytest

from kvtier_core.errors import ClosedError, UnknownRequestError
from kvtier_core.keys import RequestIdentity
from tests.session.toy import PATIENCE_S, TOKENS
from tests.sim.books import check_books

PROMPT = list(range(1, 18))  # 4 blocks and one token


def test_a_prompt_comes_back_from_the_pool_and_then_from_a_tier(make_toy):
    toy = make_toy()
    assert toy.run("a", PROMPT) == 0
    assert toy.run("b", PROMPT) == 16
    assert toy.session.flush(PATIENCE_S)
    toy.evict_pool()
    assert toy.run("c", PROMPT) == 16
    assert toy.session.stats()["hit_tokens"] == {"pool": 16, "one": 16}


def test_k12_o4_a_prompt_of_whole_blocks_leaves_one_token_to_compute(make_toy):
    toy = make_toy()
    prompt = PROMPT[:16]
    toy.run("a", prompt)
    toy.session.begin("asks", prompt)
    assert toy.session.wait_matched("asks", PATIENCE_S) == 12
    toy.session.end("asks")
    loaded = toy.run("b", prompt)
    assert loaded == 12
    assert loaded <= len(prompt) - 1


@pytest.mark.parametrize("length", [0, 1, TOKENS - 1, TOKENS, TOKENS + 1])
def test_short_prompts(make_toy, length):
    toy = make_toy()
    for name in "ab":
        assert toy.run(name, PROMPT[:length]) == (max(0, length - 1) // TOKENS * TOKENS if name == "b" else 0)


def test_k1_o4_other_salts_and_adapters_miss_in_every_tier(make_toy):
    toy = make_toy()
    toy.run("a", PROMPT, RequestIdentity(salt="A"))
    assert toy.session.flush(PATIENCE_S)
    others = [
        RequestIdentity(),
        RequestIdentity(salt="B"),
        RequestIdentity(lora="A"),
        RequestIdentity(salt="A", lora="1"),
    ]
    for number, identity in enumerate(others):
        toy.session.begin(f"other-{number}", PROMPT, identity)
        assert toy.session.wait_matched(f"other-{number}", PATIENCE_S) == 0
        toy.session.end(f"other-{number}")
    toy.evict_pool()
    assert toy.run("again", PROMPT, RequestIdentity(salt="A")) == 16
    toy.evict_pool()
    assert toy.run("none", PROMPT) == 0


def test_generated_tokens_are_stored_too(make_toy):
    toy = make_toy()
    session = toy.session
    session.begin("a", PROMPT)
    session.append("a", [50, 51, 52, 53])
    toy.compute([*PROMPT, 50, 51, 52, 53], list(range(6)))
    session.computed("a", 21, list(range(6)))
    session.end("a")
    assert session.wait_stored("a", PATIENCE_S)
    assert toy.run("b", [*PROMPT, 50, 51, 52, 53, 54]) == 20


def test_a_prefix_larger_than_the_pool_gets_what_fits(make_toy, tiers):
    toy = make_toy(num_rows=4, num_blocks=64)
    long = list(range(1, 4 * 12 + 2))  # 12 blocks
    session = toy.session
    session.begin("a", long)
    toy.compute(long, list(range(13)))
    for count in range(TOKENS, len(long) + 1, TOKENS):  # block by block, each on its way before the next
        session.computed("a", count, list(range(13)))
        assert session.flush(PATIENCE_S)
    session.end("a")
    toy.wipe()
    loads_before = sum(hook == "submit_load" for hook, _ in tiers["one"].calls)
    assert toy.run("b", long) == 4 * TOKENS
    loads = sum(hook == "submit_load" for hook, _ in tiers["one"].calls) - loads_before
    assert 1 <= loads <= 4


def test_k4_o1_preempted_blocks_are_reused_only_when_their_store_is_over(make_toy):
    toy = make_toy()
    session = toy.session
    toy.gate.clear()
    session.begin("r1", PROMPT)
    toy.compute(PROMPT, [7, 8, 9, 10, 11])
    session.computed("r1", 17, [7, 8, 9, 10, 11])
    with pytest.raises(TimeoutError):
        session.abort("r1", 0.05)
    threading.Timer(0.1, toy.gate.set).start()
    assert session.wait_stored("r1", PATIENCE_S)
    session.begin("r1", PROMPT)
    toy.compute([90 + i for i in range(17)], [7, 8, 9, 10, 11])  # r2 takes the blocks
    session.load("r1", session.wait_matched("r1", PATIENCE_S), [0, 1, 2, 3, 4])
    assert session.wait_loaded("r1", PATIENCE_S) == 16
    assert toy.holds(PROMPT, [0, 1, 2, 3, 4], 16)


def test_k4_o2_a_preempted_request_that_comes_back_waits_for_its_store(make_toy):
    toy = make_toy()
    session = toy.session
    toy.gate.clear()
    session.begin("r1", PROMPT)
    toy.compute(PROMPT, list(range(5)))
    session.computed("r1", 17, list(range(5)))
    assert session.match("r1") is None
    toy.gate.set()
    assert session.wait_matched("r1", PATIENCE_S) == 16


def test_k4_abort_waits_for_the_device_and_leaves_nothing_pinned(make_toy):
    toy = make_toy()
    toy.gate.clear()
    toy.session.begin("a", PROMPT)
    toy.session.computed("a", 17, list(range(5)))
    threading.Timer(0.1, toy.gate.set).start()
    toy.session.abort("a", PATIENCE_S)
    assert toy.session.flush(PATIENCE_S)
    state = toy.session._manager.coordinator.state
    check_books(state)
    assert not state.requests
    assert not state.ledger.leases
    assert all(not block.pins for block in state.ledger.blocks)


def test_c36_reset_in_the_middle_of_a_device_store_then_a_store_into_the_pool(make_toy):
    toy = make_toy(num_rows=4)
    session = toy.session
    toy.gate.clear()
    session.begin("old", PROMPT)
    toy.compute(PROMPT, list(range(5)))
    session.computed("old", 17, list(range(5)))  # takes all four rows, and hangs
    with pytest.raises(TimeoutError):
        session.reset_cache(0.01)
    state = session._manager.coordinator.state
    assert state.ledger.room == 0, "rows of unfinished device transfers must not be handed out"
    assert session.match("old") == 0
    toy.gate.set()
    assert session.flush(PATIENCE_S)
    assert state.ledger.room == 4
    session.end("old")
    assert toy.run("new", PROMPT) == 0
    assert toy.run("newer", PROMPT) == 16


def test_k7_o4_after_a_reset_nothing_old_surfaces(make_toy):
    toy = make_toy(("one", "two"))
    toy.run("a", PROMPT)
    assert toy.session.flush(PATIENCE_S)
    toy.session.reset_cache()
    assert toy.run("b", PROMPT) == 0
    assert toy.run("c", PROMPT) == 16


def test_k8_o3_a_request_that_never_loads_leaves_no_lease(make_toy):
    toy = make_toy()
    toy.run("a", PROMPT)
    toy.session.begin("b", PROMPT)
    assert toy.session.wait_matched("b", PATIENCE_S) == 16
    toy.session.end("b")
    assert not toy.session._manager.coordinator.state.ledger.leases


def test_k6_o1_a_bad_block_is_loaded_once_and_then_missed(make_toy, tiers):
    toy = make_toy()
    toy.run("a", PROMPT)
    assert toy.session.flush(PATIENCE_S)
    toy.evict_pool()
    blocks = tiers["one"].blocks[tiers["one"].namespace]
    toy.session.begin("probe", PROMPT)
    first = toy.session._requests["probe"].prompt.blocks[0].key
    toy.session.end("probe")
    blocks[first] = bytes(len(blocks[first]))
    loads_before = sum(hook == "submit_load" for hook, _ in tiers["one"].calls)
    toy.session.begin("b", PROMPT)
    assert toy.session.wait_matched("b", PATIENCE_S) == 0
    for _ in range(100):
        assert toy.session.match("b") == 0
        toy.session.end_step()
    assert sum(hook == "submit_load" for hook, _ in tiers["one"].calls) - loads_before == 1
    assert toy.session.stats()["tiers"]["one"]["integrity_misses"] == 1


def test_k5_o4_a_failed_device_load_is_recomputed(make_toy, monkeypatch):
    toy = make_toy()
    toy.run("a", PROMPT)
    toy.session.begin("b", PROMPT)
    assert toy.session.wait_matched("b", PATIENCE_S) == 16
    toy.session.load("b", 16, [0, 1, 2, 999])  # no such device block
    assert toy.session.wait_loaded("b", PATIENCE_S) == 0
    assert toy.session.request_hits("b") == {}
    toy.session.end("b")
    assert toy.run("c", PROMPT) == 16


def test_wait_matched_is_bounded_when_a_tier_hangs(make_toy, tiers):
    toy = make_toy(lookup_timeout=60.0)
    tiers["one"].hold.add("lookup")
    toy.session.begin("a", PROMPT)
    started = time.monotonic()
    assert toy.session.wait_matched("a", 0.2) == 0
    assert time.monotonic() - started < 10


def test_an_engine_may_wait_without_an_end(make_toy):
    toy = make_toy(num_rows=8)
    session = toy.session
    session.begin("a", PROMPT)
    assert session.wait_matched("a", math.inf) == 0
    toy.compute(PROMPT, list(range(5)))
    session.computed("a", 17, list(range(5)), wait_s=math.inf)
    assert session.wait_stored("a", math.inf)
    assert session.flush(math.inf)
    toy.gate.clear()
    session.begin("b", [*range(100, 117)])
    session.computed("b", 4, [0])
    threading.Timer(0.1, toy.gate.set).start()
    assert session.wait(math.inf)
    session.abort("b", math.inf)
    assert session.close(math.inf)


def test_a_time_to_wait_that_is_none_is_over_at_once(make_toy, tiers):
    toy = make_toy(lookup_timeout=60.0)
    tiers["one"].hold.add("lookup")
    toy.session.begin("a", PROMPT)
    assert toy.session.wait_matched("a", math.nan) == 0


def test_blocks_whose_store_failed_while_the_engine_waited_for_room_are_offered_again(make_toy, tiers):
    toy = make_toy(num_rows=8)  # one block a transfer, and room for two on their way to the tier
    session = toy.session
    session.begin("a", PROMPT)
    toy.compute(PROMPT, list(range(5)))
    toy.gate.clear()
    threading.Timer(0.1, toy.gate.set).start()
    session.computed("a", 17, [999, 1, 2, 3, 4], wait_s=PATIENCE_S)  # there is no such device block
    assert session.wait_stored("a", PATIENCE_S)
    session.computed("a", 17, list(range(5)), wait_s=PATIENCE_S)
    session.end("a")
    assert session.wait_stored("a", PATIENCE_S)
    assert toy.run("b", PROMPT) == 16


def test_mistakes_of_the_engine_are_errors(make_toy):
    toy = make_toy()
    toy.run("a", PROMPT)
    toy.session.begin("b", PROMPT)
    with pytest.raises(ValueError, match="still known"):
        toy.session.begin("b", PROMPT)
    toy.session.wait_matched("b", PATIENCE_S)
    with pytest.raises(ValueError, match="4 blocks to load, but only 1"):
        toy.session.load("b", 16, [0])
    with pytest.raises(UnknownRequestError, match="'unknown' is not known"):
        toy.session.load("unknown", 16, [0])
    with pytest.raises(ValueError, match="at least 0"):
        toy.session.load("b", -1, [0])
    for nonsense in ([2**63], [[1], [2]], [1.5], ["a"], [None]):
        with pytest.raises(ValueError, match="token ids"):
            toy.session.begin("c", nonsense)
        with pytest.raises(ValueError, match="token ids"):
            toy.session.append("b", nonsense * TOKENS)
    toy.session.begin("c", PROMPT)  # a refused one has left nothing behind
    toy.session.append("b", [1, 2, 3, 4])
    toy.session.load("b", 16, [0, 1, 2, 3])
    with pytest.raises(ValueError, match="under way"):
        toy.session.load("b", 16, [0, 1, 2, 3])


def test_close_twice_and_nothing_afterwards(make_toy):
    toy = make_toy()
    toy.session.begin("a", PROMPT)
    assert toy.session.close(PATIENCE_S)
    assert toy.session.close(PATIENCE_S)
    for use in (
        lambda: toy.session.begin("b", PROMPT),
        lambda: toy.session.match("a"),
        lambda: toy.session.computed("a", 4, [0]),
        lambda: toy.session.end("a"),
        toy.session.end_step,
        toy.session.reset_cache,
    ):
        with pytest.raises(ClosedError):
            use()


def test_c13_computed_with_too_few_device_blocks_is_refused_before_anything_is_reserved(make_toy):
    toy = make_toy()
    toy.session.begin("a", PROMPT)
    with pytest.raises(ValueError, match="4 whole blocks were computed, but only 2"):
        toy.session.computed("a", 17, [0, 1])
    with pytest.raises(TypeError):
        toy.session.computed("a", 17, None)
    toy.session.end("a")
    assert toy.session.flush(PATIENCE_S)
    assert toy.session.stats()["pool"]["free_rows"] == 16


def test_c34_what_a_request_computed_before_a_reset_is_not_stored_after_it(make_toy):
    toy = make_toy()
    session = toy.session
    session.begin("a", PROMPT)
    toy.compute(PROMPT, list(range(5)))
    session.reset_cache()
    session.computed("a", 17, list(range(5)))
    session.end("a")
    assert session.flush(PATIENCE_S)
    assert toy.run("b", PROMPT) == 0
    # A request that is preempted begins again, with the new weights.
    session.begin("c", [*PROMPT, 99])
    session.reset_cache()
    session.abort("c", PATIENCE_S)
    session.begin("c", [*PROMPT, 99])
    toy.compute([*PROMPT, 99], list(range(5)))
    session.computed("c", 18, list(range(5)))
    session.end("c")
    assert session.wait_stored("c", PATIENCE_S)
    assert toy.run("d", PROMPT) == 16


def test_close_with_a_hung_tier_is_bounded_says_so_and_keeps_the_mapping(
    make_toy, tiers, monkeypatch, caplog
):
    monkeypatch.setattr("kvtier_core.manager.tiers._SILENT_SHUTDOWN_S", 0.1)
    toy = make_toy()
    tiers["one"].hang_in["on_new_request"] = threading.Event()
    toy.session.begin("a", PROMPT)
    assert not toy.session.close(0.5)
    assert "for tier 'one' (type 'faulty' of test 1) to shut down" in caplog.text
    tiers["one"].hang_in["on_new_request"].set()
    assert toy.session.close(PATIENCE_S)


def test_c28_a_pool_not_much_larger_than_the_prompt_stores_all_of_it_when_the_engine_waits(make_toy, tiers):
    long = list(range(1, 4 * 16 + 2))  # 16 blocks; a tier may have a quarter of the pool's 18 rows pinned
    left_out = {}
    for wait_s in (0.0, PATIENCE_S):
        toy = make_toy(num_rows=18)
        session = toy.session
        session.begin("a", long)
        toy.compute(long, list(range(17)))
        if not wait_s:
            tiers["one"].hold.add("store")  # however slow this machine is, the tier is slower
        session.computed("a", len(long), list(range(17)), wait_s=wait_s)
        assert session.wait_stored("a", PATIENCE_S)
        tiers["one"].hold.clear()
        tiers["one"].release()
        session.end("a")
        assert session.flush(PATIENCE_S)
        tier = session.stats()["tiers"]["one"]
        assert tier["stored_blocks"] == 16, "what was left out is made up for by the end of a flush"
        left_out[wait_s] = tier["dropped_blocks"]
    assert left_out[PATIENCE_S] == 0
    assert left_out[0.0] > 0


def test_c28_an_engine_waits_once_for_a_tier_that_is_behind_until_that_has_caught_up(
    make_toy, tiers, monkeypatch
):
    toy = make_toy(num_rows=18)
    session = toy.session
    waits: list[str] = []
    wait = session.wait

    def note_wait(request: str, timeout_s: float) -> None:
        waits.append(request)
        wait(timeout_s)

    def offer(request: str, wait_s: float) -> None:
        tokens = [1000 * int(request) + position for position in range(4 * 8 + 1)]
        session.begin(request, tokens)
        with monkeypatch.context() as patched:
            patched.setattr(session, "wait", partial(note_wait, request))
            session.computed(request, len(tokens), list(range(9)), wait_s=wait_s)
        assert session.wait_stored(request, PATIENCE_S)
        session.end(request)

    tiers["one"].hold.add("store")
    for request, wait_s in (("0", 0.0), ("1", 0.2), ("2", 0.2), ("3", 0.2)):
        offer(request, wait_s)
    assert set(waits) == {"1"}, "an offer that must not wait is no wait in vain"
    tiers["one"].hold.clear()
    tiers["one"].release()
    assert session.flush(PATIENCE_S)
    tiers["one"].hold.add("store")
    offer("4", 0.2)
    assert set(waits) == {"1", "4"}
    tiers["one"].hold.clear()
    tiers["one"].release()
    assert session.flush(PATIENCE_S)


def test_c31_a_hung_tier_holds_up_an_engine_that_waits_no_longer_than_it_said(make_toy, tiers):
    toy = make_toy(num_rows=18)
    tiers["one"].hold.add("store")
    session = toy.session
    long = list(range(1, 4 * 16 + 2))
    session.begin("a", long)
    started = time.monotonic()
    session.computed("a", len(long), list(range(17)), wait_s=0.3)
    assert 0.3 <= time.monotonic() - started < 10
    session.end("a")


def test_c27_a_request_restricts_its_tiers(make_toy):
    toy = make_toy(("one", "two"))
    session = toy.session
    session.begin("a", PROMPT, params={"kvtier": {"store_tiers": ["two"]}})
    toy.compute(PROMPT, list(range(5)))
    session.computed("a", 17, list(range(5)))
    session.end("a")
    assert session.flush(PATIENCE_S)
    assert [tier["stored_blocks"] for tier in session.stats()["tiers"].values()] == [0, 4]
    toy.evict_pool()
    session.begin("b", PROMPT, params={"kvtier": {"load_tiers": ["one"]}})
    assert session.wait_matched("b", PATIENCE_S) == 0
    session.begin("c", PROMPT, params={"kvtier": {"load_tiers": ["two"]}})
    assert session.wait_matched("c", PATIENCE_S) == 16
    with pytest.raises(ValueError, match="load_tiers names 'three', but the enabled tiers are 'one', 'two'"):
        session.begin("d", PROMPT, params={"kvtier": {"load_tiers": ["three"]}})
    session.begin("d", PROMPT)


def test_c25_remote_decode_stores_what_was_loaded_as_well(make_toy, tiers):
    toy = make_toy(("one", "two"))
    session = toy.session
    session.begin("a", PROMPT, params={"kvtier": {"store_tiers": ["one"]}})
    toy.compute(PROMPT, list(range(5)))
    session.computed("a", 17, list(range(5)))
    session.end("a")
    assert session.flush(PATIENCE_S)
    toy.evict_pool()
    stored = session.stats()["tiers"]["two"]["stored_blocks"]
    session.begin("b", PROMPT, params={"do_remote_decode": True})
    session.load("b", session.wait_matched("b", PATIENCE_S), list(range(5)))
    assert session.wait_loaded("b", PATIENCE_S) == 16
    session.computed("b", 17, list(range(5)))
    session.end("b")
    assert session.flush(PATIENCE_S)
    assert session.stats()["tiers"]["two"]["stored_blocks"] - stored == 4


def test_r10_a_forked_child_has_no_session(make_toy):
    toy = make_toy()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        try:
            for use in (
                toy.session.end_step,
                lambda: toy.session.wait_stored("any"),
                lambda: toy.session.wait(PATIENCE_S),
            ):
                try:
                    use()
                except ClosedError as error:
                    said.append(str(error))
            said.append(str(toy.session.close(PATIENCE_S)))
            os.write(writing, "\n".join(said).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        *said, closed = answers.read().splitlines()
    os.waitpid(child, 0)
    assert len(said) == 3
    assert all("forked" in line and "open another" in line for line in said)
    assert closed == "True"
    toy.session.end_step()
