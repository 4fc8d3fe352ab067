"""Every deliberate fault in the coordinator is seen by the simulator or by the unit test that is named beside it."""

import pytest

from kvtier_core.coordinator import endpoints
from tests.coordinator import mutants, test_endpoints, test_primary
from tests.coordinator.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name.replace(" ", "-") for mutant in MUTANTS])
def test_a_mutant_is_killed(mutant):
    assert mutants.kill(mutant) is not None, "nothing has seen it"


def test_there_are_many_and_each_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


def test_a_mutant_lives_only_while_it_is_wanted():
    module = "kvtier_core.coordinator.endpoints"
    mutant = Mutant(name="nonsense", module=module, old="return 0\n", new="return 1\n")
    find_end = endpoints.find_end
    costs = test_endpoints.groups((4, None, "x"))
    with mutants.alive(mutant):
        assert find_end(costs, 0) == 1
    assert find_end(costs, 0) == 0


@pytest.mark.parametrize("old", ["text that stands nowhere", "return"])
def test_a_mutant_whose_text_is_not_found_once_says_so(old):
    mutant = Mutant(name="lost", module="kvtier_core.coordinator.endpoints", old=old, new="")
    with pytest.raises(LookupError, match="write it anew"), mutants.alive(mutant):
        pass


def test_what_sees_nothing_is_reported_as_a_survivor(monkeypatch, capsys):
    harmless = Mutant(
        name="harmless",
        module="kvtier_core.coordinator.endpoints",
        old="        end -= unit\n",
        new="        end = end - unit\n",
        killer=test_primary.test_c60_a_miss_counts_once_per_request_and_key,
    )
    monkeypatch.setattr(mutants, "MUTANTS", (harmless,))
    assert mutants.main() == 1
    assert "SURVIVES  harmless" in capsys.readouterr().out
