"""A tier's own objects may say something else each time, and have attributes that the core knows too (C30)."""

import pytest

from kvtier_core.hookspecs import hookimpl
from kvtier_core.values import JobResult
from kvtier_testing.faulty import FaultyTier
from tests.manager.conftest import key


class Fickle:
    """An attribute that has another value each time it is read; the last one stays."""

    def __init__(self, *values):
        self._values = list(values)

    def __get__(self, instance, owner):
        return self._values.pop(0) if len(self._values) > 1 else self._values[0]


def fickle(base, **attributes):
    """An instance of *base* whose attributes change when they are looked at."""
    changing = type("Changing", (base,), {name: Fickle(*values) for name, values in attributes.items()})
    return object.__new__(changing)


def hold_two_loads(bench):
    """Two loads of one tier under way; their jobs."""
    tier = bench.tiers["one"]
    for name, number in (("a", 1), ("b", 2)):
        bench.new(name)
        bench.store(name, number)
    bench.settle()
    bench.evict_all()
    tier.hold.add("load")
    for name, number in (("a", 1), ("b", 2)):
        bench.manager.lookup(name, [[key(number)]])
    bench.until(lambda: len(tier.held) == 2)
    return [job for _, job, _ in tier.held]


def test_c30_c03_a_result_whose_job_changes_makes_no_other_jobs_rows_visible(make_bench):
    bench = make_bench(max_quarantined=1.0)
    first, second = hold_two_loads(bench)
    attributes = {"job_id": (first.id, second.id), "present": (None,), "missing": ((),), "failed": ((),)}
    tier = bench.tiers["one"]
    tier.extra_results.append(fickle(JobResult, error=(None,), **attributes))
    tier.context.wake()
    bench.until(lambda: first.id not in bench.manager.coordinator.state.jobs)
    assert bench.manager.coordinator.counters.tiers["one"].integrity == 1, "the first was not filled"
    assert second.id in bench.manager.coordinator.state.jobs
    assert not bench.manager.lookup("b", [[key(2)]]).is_settled
    tier.held.pop(0)
    tier.release()
    assert bench.load("b", 2) == [True]
    assert bench.manager.counters.tiers["one"].faults == 0


def test_c30_a_result_that_can_not_be_looked_at_costs_no_other_job_its_own(make_bench):
    class Unreadable(JobResult):
        @property
        def job_id(self):
            raise RuntimeError("not now")

    bench = make_bench(max_quarantined=1.0)
    hold_two_loads(bench)
    tier = bench.tiers["one"]
    tier._results.append(object.__new__(Unreadable))
    tier.release()
    assert (bench.load("a", 1), bench.load("b", 2)) == ([True], [True])
    assert bench.manager.counters.tiers["one"].faults == 1


def lose_the_connection():
    raise OSError("lost the connection")


@pytest.mark.parametrize("end", [lose_the_connection, lambda: None], ids=["raises", "never ends"])
def test_c30_what_was_read_of_an_answer_that_has_no_good_end_counts(make_bench, end):
    def answer(results):
        yield from results
        while True:
            yield end()

    def prepare(tier):
        honest = tier.get_finished_jobs
        tier.get_finished_jobs = hookimpl(lambda: answer(honest()))

    bench = make_bench(prepare=prepare, max_quarantined=1.0, breaker_failures=10**9)
    hold_two_loads(bench)
    bench.tiers["one"].release()
    assert (bench.load("a", 1), bench.load("b", 2)) == ([True], [True])
    assert bench.manager.counters.tiers["one"].faults > 0


def raise_it(*_arguments, **_named):
    raise OSError("this is no hook")


@pytest.mark.parametrize("value", [True, raise_it, lambda: 7, lambda *_arguments, **_named: None])
@pytest.mark.parametrize("name", ["resident_presence", "discard"])
def test_c30_attributes_of_a_plugin_that_are_no_hooks_are_its_own(make_bench, monkeypatch, name, value):
    monkeypatch.setattr(FaultyTier, name, value, raising=False)
    bench = make_bench()
    bench.new("a")
    bench.store("a", 1)
    bench.settle()
    bench.evict_all()
    assert bench.load("a", 1) == [True]
    bench.evict_all()
    bench.tiers["one"].corrupt = True
    bench.new("b")
    assert bench.load("b", 1) == []
    counters = bench.manager.counters.tiers["one"]
    assert (counters.integrity, counters.faults) == (1, 0)
