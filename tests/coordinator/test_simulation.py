"""Seeded random runs (K3-O4): no rule is ever broken, everything comes to rest, every outcome is seen."""

import json

import pytest

from kvtier_core.coordinator.cascades import Cascades
from tests.sim.__main__ import main
from tests.sim.outcomes import OUTCOMES
from tests.sim.random_run import Simulation
from tests.sim.runs import Summary, run_seeds
from tests.sim.scripted import TierScript
from tests.sim.shapes import Shape
from tests.sim.world import generous_limits


def test_random_runs_break_no_rule_and_see_every_outcome():
    summary = run_seeds(0, 60, 500)
    while summary.unseen_outcomes and summary.seeds < 600 and not summary.violations:
        more = run_seeds(summary.seeds, 60, 500)
        summary.seeds += more.seeds
        summary.seen.update(more.seen)
        summary.violations += more.violations
    assert summary.violations == []
    assert summary.unseen_outcomes == []


def test_c10_a_pending_answer_ends_when_a_tier_takes_back_a_block_that_had_come():
    # A load reports blocks early; its result says that they are not whole. Another request was promised them meanwhile.
    assert run_seeds(156, 1, 4000).violations == []


def test_k3_o4_ten_thousand_requests_leave_no_reference_behind():
    shape = Shape(
        num_rows=64,
        tiers=[TierScript(name="a", resident=True)],
        limits=generous_limits(64, max_promotion_rows=32),
        max_requests=8,
        max_blocks=3,
        num_roots=80,
    )
    simulation = Simulation(64, shape, check_every=100)
    while simulation.num_requests < 10_000:
        simulation.step()
    assert simulation.world.coordinator.counters.evicted > 500
    simulation.come_to_rest()
    assert simulation.world.ledger.room == 64


def test_one_seed_is_one_run():
    one, two = Simulation(7), Simulation(7)
    one.run(300)
    two.run(300)
    assert one.watcher.seen == two.watcher.seen
    assert [*one.world.hooks.calls] == [*two.world.hooks.calls]


def test_a_broken_rule_is_reported_with_its_replay(monkeypatch, capsys):
    monkeypatch.setattr(Cascades, "_unpin", lambda *_: None)
    assert main(["--seeds", "3", "--steps", "400", "--first-seed", "11", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["violations"] == len(report["replays"]) == 3
    assert "--first-seed 11 --seeds 1 --steps 400" in report["replays"][0]


def test_the_command_line_reports_what_it_saw(capsys):
    assert main(["--seeds", "2", "--steps", "50"]) == 0
    printed = capsys.readouterr().out
    assert "violations: 0" in printed
    assert "steps: 100" in printed


def test_nothing_seen_means_everything_unseen():
    assert Summary().unseen_outcomes == sorted(OUTCOMES)


@pytest.mark.parametrize("seed", range(5))
def test_tiny_and_large_worlds_come_to_rest_from_any_step(seed):
    simulation = Simulation(seed)
    simulation.run(seed * 37)
