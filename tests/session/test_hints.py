"""Hints from ``begin`` to the pool's rows, over real tiers and copies."""

from kvtier_core.hints import Hints
from tests.session.toy import PATIENCE_S, TOKENS

PROMPT = list(range(1, 3 * TOKENS + 2))


def begin_and_compute(toy, request_id, hints):
    ids = list(range(4))
    toy.session.begin(request_id, PROMPT, hints=hints)
    toy.session.wait_matched(request_id, PATIENCE_S)
    toy.compute(PROMPT, ids)
    toy.session.computed(request_id, len(PROMPT), ids)
    toy.session.end(request_id)
    assert toy.session.flush(PATIENCE_S)


def test_pinned_blocks_outlive_the_eviction_of_all_others(make_toy):
    toy = make_toy((), num_rows=16)
    row_bytes = toy.session.stats()["pool"]["row_bytes"]
    begin_and_compute(toy, "pins", Hints(pin_s=600, pin_bytes=2 * row_bytes))
    toy.evict_pool()
    stats = toy.session.stats()
    assert (stats["pool"]["held_rows"], stats["pool"]["pinned_rows"]) == (2, 2)
    assert stats["hints"]["pin"] == 1
    assert toy.run("again", PROMPT) == 2 * TOKENS


def test_more_than_a_share_of_the_pool_is_not_pinned(make_toy):
    toy = make_toy((), num_rows=16)
    begin_and_compute(toy, "pins", Hints(pin_s=600))
    pool = toy.session.stats()["pool"]
    assert (pool["pinned_rows"], pool["not_kept_blocks"]) == (16 // 8, 1)


def test_what_is_dropped_is_in_no_tier(make_toy, tiers):
    toy = make_toy()
    begin_and_compute(toy, "drops", Hints(drop=True))
    assert toy.run("again", PROMPT) == 0
    begin_and_compute(toy, "drops again", Hints(drop=True))
    assert toy.session.stats()["tiers"]["one"]["stored_blocks"] == 3  # of "again" alone


def test_a_prefetch_has_brought_the_prompt_when_its_request_asks(make_toy):
    toy = make_toy()
    assert toy.run("first", PROMPT) == 0
    assert toy.session.flush(PATIENCE_S)
    toy.evict_pool()
    toy.session.begin("waits", PROMPT, hints=Hints(prefetch=True))
    while toy.session.stats()["tiers"]["one"]["loaded_blocks"] < 3:
        toy.session.end_step()
        assert toy.session.wait(PATIENCE_S)
    assert toy.session.match("waits") == 3 * TOKENS
    toy.session.end("waits")
