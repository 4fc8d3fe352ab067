"""What computing costs in vLLM, from its own steps (C35)."""

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


def test_steps_that_were_scheduled_ahead_are_timed_by_themselves(monkeypatch):
    from types import SimpleNamespace

    from kvtier_vllm.steps import StepCost, Steps

    steps = Steps()
    told: list[float] = []
    cost = StepCost(told.append)
    steps._costs.add(cost)
    outputs = [SimpleNamespace(num_scheduled_tokens={"r": 1000}) for _ in range(5)]
    scheduled, times = iter(outputs), iter([0.0, 0.0, 0.0, 4.0, 4.0, 8.0, 12.0])
    monkeypatch.setattr("kvtier_vllm.steps.time.monotonic", times.__next__)

    def begin():
        steps._around_begin(lambda _: next(scheduled), None)

    def end(output):
        steps._around_end(lambda *_: None, None, output)

    begin()  # a step that failed
    begin()
    begin()
    end(outputs[1])
    begin()
    end(outputs[2])
    end(outputs[3])
    assert told == [pytest.approx(0.004)]


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
