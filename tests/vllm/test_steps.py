"""What computing costs in vLLM, from its own steps (C35)."""

from types import SimpleNamespace

import pytest

from tests.vllm.engines import connector, needs_vllm, prompt

pytestmark = [
    needs_vllm,
    pytest.mark.timeout(1800),
    # The first import of vLLM's scheduler compiles with torch, which warns of itself.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


def test_prefill_steps_tell_the_cost_and_decoding_does_not():
    from kvtier_vllm.steps import StepCost

    told: list[float] = []
    cost = StepCost(told.append)
    for _ in range(9):
        cost.add({str(number): 1 for number in range(256)}, 9.0)
        cost.add({"short": 100}, 9.0)
        cost.add({"long": 200, **{str(number): 1 for number in range(201)}}, 9.0)
    assert not told
    for _ in range(3):
        cost.add({"long": 500, "other": 500, "decodes": 1}, 2.0)
    assert told == [pytest.approx(0.002)]


class Engine:
    """A scheduler that says at each step whose cost it is."""

    def __init__(self, steps) -> None:
        from kvtier_vllm.steps import StepCost

        self.told: list[float] = []
        self._steps, self._cost = steps, StepCost(self.told.append)
        steps._costs.add(self._cost)

    def begin(self, tokens=1000):
        def schedule(_scheduler):
            self._steps.belongs_here(self._cost)
            return SimpleNamespace(num_scheduled_tokens={"r": tokens})

        return self._steps._around_begin(schedule, self)

    def end(self, output):
        self._steps._around_end(lambda *_: None, self, output)


@pytest.fixture
def clock(monkeypatch):
    """Sets what the time is at each look, in order."""

    def set_times(*times):
        monkeypatch.setattr("kvtier_vllm.steps.time.monotonic", iter(times).__next__)

    return set_times


def test_steps_that_were_scheduled_ahead_are_timed_by_themselves(clock):
    from kvtier_vllm.steps import Steps

    engine = Engine(Steps())
    clock(0.0, 0.0, 0.0, 4.0, 4.0, 8.0, 12.0)
    engine.begin()  # a step that failed
    first, second = engine.begin(), engine.begin()
    engine.end(first)
    third = engine.begin()
    engine.end(second)
    engine.end(third)
    assert engine.told == [pytest.approx(0.004)]


def test_c35_each_engine_of_a_process_is_timed_by_itself(clock):
    from kvtier_vllm.steps import Steps

    steps = Steps()
    slow, quick = Engine(steps), Engine(steps)
    for number in range(3):
        clock(*(10.0 * number + seconds for seconds in (0.0, 1.0, 2.0, 8.0)))
        outputs = slow.begin(), quick.begin(tokens=500)
        quick.end(outputs[1])
        slow.end(outputs[0])
    assert slow.told == [pytest.approx(0.008)]
    assert quick.told == [pytest.approx(0.002)]


def test_c35_a_tier_slower_than_computing_is_passed_over(start, plain, awkward):
    awkward.give(slow=0.3)
    engine = start(
        connector(awkward.settings(pool="1MiB")), environment=awkward.environment, learns_cost=True
    )
    prompts = [prompt(seed, blocks=12) for seed in range(8)]  # the pool has room for two
    expected = plain.generate(*prompts)
    for wanted, answer in zip(prompts, expected, strict=True):
        assert engine.store(wanted) == [answer]
        engine.call("settle")
    for wanted, answer in zip(prompts, expected, strict=True):
        assert engine.call("reset")
        assert engine.generate(wanted) == [answer]
    metrics = engine.call("metrics")
    assert metrics['vllm:kvtier_hit_blocks{"source": "awkward"}'] > 0  # until its time was known
    assert metrics['vllm:kvtier_misses{"reason": "break_even"}'] > 0
