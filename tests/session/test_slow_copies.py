"""A reset, and a close, are over when no device copy touches the engine's KV memory any more (C34, C36)."""

import threading

import pytest

from tests.session.toy import PATIENCE_S

PROMPT = list(range(17))
IDS = list(range(5))


def computing(toy) -> None:
    """A request has computed its prompt; its two stores wait in the device's lane for the compute to end."""
    toy.gate.clear()
    toy.session.begin("a", PROMPT)
    toy.compute(PROMPT, IDS)
    toy.session.computed("a", 17, IDS)


@pytest.mark.parametrize("end", ["reset_cache", "close"])
def test_v13_a_reset_and_a_close_wait_for_a_copy_that_was_handed_out(make_toy, end):
    toy = make_toy()
    computing(toy)
    order = []

    def run() -> None:
        getattr(toy.session, end)(PATIENCE_S)
        order.append(end)

    thread = threading.Thread(target=run)
    control = toy.session._pool.control
    finish = control.finish

    def noting(*args, **kwargs):
        order.append("copied")
        finish(*args, **kwargs)

    control.finish = noting
    thread.start()
    toy.gate.set()
    thread.join(PATIENCE_S)
    assert order == ["copied", "copied", end]


def test_v13_a_reset_that_waited_in_vain_says_that_kv_memory_is_still_used(make_toy):
    toy = make_toy()
    computing(toy)
    with pytest.raises(TimeoutError, match=r"the cache was reset, but device copies .* keep the engine's KV"):
        toy.session.reset_cache(0.01)
    toy.gate.set()
    assert toy.session.wait_stored("a", PATIENCE_S)
    toy.session.end("a")
    toy.wipe()
    assert toy.run("b", PROMPT) == 0
