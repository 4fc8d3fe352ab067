"""How long a step of the scheduler waits for tiers."""

from kvtier_vllm.idle import IDLE_WAIT_S, YIELD_S, Waiters


def make(*requests: str) -> Waiters:
    waiters = Waiters()
    for request in requests:
        waiters.begin(request)
    return waiters


def test_a_step_in_which_nobody_waits_for_a_tier_waits_for_nothing():
    assert make("a").end_step(()) == 0.0
    assert make("a").end_step(["a"]) == 0.0


def test_a_step_waits_where_no_request_can_run():
    waiters = make("a", "b")
    waiters.wait("a")
    waiters.wait("b")
    assert waiters.end_step(()) == IDLE_WAIT_S


def test_a_request_that_is_copied_to_the_device_can_not_run_either():
    waiters = make("a", "b")
    waiters.wait("a")
    assert waiters.end_step(["b"]) == IDLE_WAIT_S


def test_a_step_only_lets_others_run_where_a_request_may_run():
    waiters = make("a", "b")
    waiters.wait("a")
    assert waiters.end_step(()) == YIELD_S


def test_who_waited_in_an_earlier_step_does_not_wait_in_this_one():
    waiters = make("a")
    waiters.wait("a")
    waiters.end_step(())
    assert waiters.end_step(()) == 0.0


def test_a_request_that_is_over_counts_no_more():
    waiters = make("a", "b")
    waiters.wait("a")
    waiters.wait("b")
    waiters.end("b")
    waiters.end("b")
    assert waiters.end_step(()) == IDLE_WAIT_S
    waiters.wait("a")
    waiters.end("a")
    assert waiters.end_step(()) == 0.0
