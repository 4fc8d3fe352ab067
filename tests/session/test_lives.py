"""Lives of requests (K4, K5, K8): aborted, sharing a promotion, with steps or without; why they miss."""

from collections.abc import Callable, Iterator

import pytest

from kvtier_core.namespace import GroupSpec
from kvtier_testing.faulty import FaultyTier
from tests.session.grouped import PAYLOAD, GroupedToy
from tests.session.toy import PATIENCE_S
from tests.sim.books import check_books

GROUPS = (
    GroupSpec(layers=("0",), block_bytes=PAYLOAD),
    GroupSpec(layers=("1",), block_bytes=PAYLOAD, window=8),
)
PROMPT = list(range(1, 26))  # six blocks of four tokens, and one token


@pytest.fixture(params=[GROUPS[:1], GROUPS], ids=["one group", "two groups"])
def toy(request: pytest.FixtureRequest) -> Iterator[GroupedToy]:
    """A toy engine with one tier, "one", in which PROMPT is stored, while the pool holds other blocks."""
    tiers: dict[str, FaultyTier] = {}
    toy = GroupedToy(request.param, 4, 20, tiers)
    toy.run("first", PROMPT)
    toy.empty_pool()
    yield toy
    toy.device.is_stuck = False
    tiers["one"].hold.clear()
    tiers["one"].release()
    toy.session.close(PATIENCE_S)


def tier_of(toy: GroupedToy) -> FaultyTier:
    return toy._tiers["one"]


def count(toy: GroupedToy, hook: str) -> int:
    """How often the tier saw a hook called."""
    return sum(name == hook for name, _ in tier_of(toy).calls)


def step_until(toy: GroupedToy, condition: Callable[[], bool]) -> None:
    """Steps of an engine, each of which waits for what happens, until *condition* holds."""
    for _ in range(1000):
        if condition():
            return
        toy.session.end_step()
        toy.session.wait(0.1)
    raise AssertionError("the condition did not come about")


def is_at_rest(toy: GroupedToy) -> bool:
    """Whether nothing is pinned, leased or under way."""
    state = toy.session._manager.coordinator.state
    check_books(state)
    return not state.jobs and not state.ledger.leases and not any(block.pins for block in state.ledger.blocks)


def test_an_engine_with_steps_asks_once_a_step_and_never_waits(toy):
    session = toy.session
    session.begin("a", PROMPT)
    answers: list[int | None] = []

    def is_known() -> bool:
        answers.append(session.match("a"))
        return answers[-1] is not None

    step_until(toy, is_known)
    assert answers[-1] == 24
    assert set(answers[:-1]) == {None}
    session.end("a")


def test_c21_several_requests_share_a_promotion(toy):
    session, loads = toy.session, count(toy, "submit_load")
    tier_of(toy).hold.add("load")
    for name in "abc":
        session.begin(name, PROMPT)

    def asked() -> bool:
        assert [session.match(name) for name in "abc"] == [None] * 3
        return bool(tier_of(toy).held)

    step_until(toy, asked)
    tier_of(toy).hold.clear()
    tier_of(toy).release()
    for name in "abc":
        assert session.wait_matched(name, PATIENCE_S) == 24
        session.load(name, 24, toy.ids(len(PROMPT)))
        assert session.wait_loaded(name, PATIENCE_S) == 24
        toy.check(PROMPT, toy.ids(len(PROMPT)), 24)
        session.end(name)
    assert count(toy, "submit_load") - loads <= 2, "at most the two waves that half of the pool allows"
    step_until(toy, lambda: is_at_rest(toy))


def test_c21_k4_whoever_waits_keeps_the_promotion_of_a_request_that_was_aborted(toy):
    session = toy.session
    tier_of(toy).hold.add("load")
    session.begin("goes", PROMPT)
    step_until(toy, lambda: session.match("goes") is None and bool(tier_of(toy).held))
    session.begin("stays", PROMPT)
    assert session.match("stays") is None
    session.abort("goes", PATIENCE_S)
    tier_of(toy).hold.clear()
    tier_of(toy).release()
    assert session.wait_matched("stays", PATIENCE_S) == 24
    session.end("stays")
    step_until(toy, lambda: is_at_rest(toy))


def test_k4_a_request_aborted_while_it_waits_leaves_nothing_behind(toy):
    session = toy.session
    tier_of(toy).hold.add("load")
    session.begin("a", PROMPT)
    step_until(toy, lambda: session.match("a") is None and bool(tier_of(toy).held))
    session.abort("a", PATIENCE_S)
    tier_of(toy).hold.clear()
    tier_of(toy).release()
    step_until(toy, lambda: is_at_rest(toy))


def test_k4_o1_device_blocks_are_given_back_only_when_the_load_into_them_is_over(toy):
    session, ids = toy.session, toy.ids(len(PROMPT))
    session.begin("a", PROMPT)
    session.load("a", session.wait_matched("a", PATIENCE_S), ids)
    toy.device.is_stuck = True
    with pytest.raises(TimeoutError, match="load jobs"):
        session.wait_loaded("a", 0.01)
    with pytest.raises(TimeoutError, match="load jobs"):
        session.abort("a", 0.01)
    toy.device.is_stuck = False
    step_until(toy, lambda: is_at_rest(toy))


def test_k5_o4_a_failed_load_is_recomputed_and_the_next_request_is_fine(toy):
    session, ids = toy.session, toy.ids(len(PROMPT))
    toy.device.failing_groups = {0}
    session.begin("a", PROMPT)
    session.load("a", session.wait_matched("a", PATIENCE_S), ids)
    assert session.wait_loaded("a", PATIENCE_S) == 0
    toy.compute(PROMPT, ids)
    session.computed("a", len(PROMPT), ids)
    session.end("a")
    toy.device.failing_groups = set()
    assert toy.run("b", PROMPT) == 24
    step_until(toy, lambda: is_at_rest(toy))


def test_k8_o3_leases_of_a_request_that_never_loads_end_with_it(toy):
    session = toy.session
    session.begin("a", PROMPT)
    assert session.wait_matched("a", PATIENCE_S) == 24
    assert not is_at_rest(toy)
    session.end("a")
    step_until(toy, lambda: is_at_rest(toy))


def test_k3_o1_what_was_said_to_be_loadable_stays_while_others_store(toy):
    session = toy.session
    session.begin("a", PROMPT)
    assert session.wait_matched("a", PATIENCE_S) == 24
    for number in range(30):
        toy.run(f"other-{number}", [500 + number] * 5)
    session.load("a", 24, toy.ids(len(PROMPT)))
    assert session.wait_loaded("a", PATIENCE_S) == 24
    toy.check(PROMPT, toy.ids(len(PROMPT)), 24)
    session.end("a")


# -- why a request misses


def test_c60_a_request_can_be_asked_why_it_missed(toy):
    session = toy.session
    prompt = [*PROMPT[:16], *([9] * 9)]
    session.begin("a", prompt)
    assert session.wait_matched("a", PATIENCE_S) == 16
    assert session.explain("a") == [{"from_token": 16, "group": 0, "reason": "not_stored"}]
    session.end("a")


def test_c60_c35_a_request_that_computes_faster_is_told_so(toy):
    session = toy.session
    for number in range(3):
        toy.run(f"measures-{number}", PROMPT)
        toy.empty_pool()
    assert session.stats()["tiers"]["one"]["expected_load_seconds"]["per_block"] >= 0
    session.set_recompute_cost(0.0)
    session.begin("a", PROMPT)
    assert session.wait_matched("a", PATIENCE_S) == 0
    assert {miss["reason"] for miss in session.explain("a")} == {"break_even"}
    assert session.stats()["tiers"]["one"]["passed_over_blocks"] >= 6
    assert session.stats()["tiers"]["one"]["passed_over"] is True
    session.end("a")
    session.set_recompute_cost(1000.0)
    assert toy.run("b", PROMPT) == 24


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1, -0.1])
def test_c35_a_cost_that_is_none_is_refused_at_once(toy, cost):
    with pytest.raises(ValueError, match="recompute cost must be seconds a token"):
        toy.session.set_recompute_cost(cost)


def test_c60_what_a_tier_took_is_counted_by_kind(make_toy):
    toy = make_toy()
    assert toy.run("first", PROMPT) == 0
    assert toy.session.flush(PATIENCE_S)
    toy.evict_pool()
    assert toy.run("again", PROMPT) > 0
    figures = toy.session.stats()["tiers"]["one"]
    for kind in ("load", "store"):
        assert figures[f"{kind}_jobs"] >= 1
        assert 0 < figures[f"{kind}_seconds"] < PATIENCE_S * figures[f"{kind}_jobs"]
