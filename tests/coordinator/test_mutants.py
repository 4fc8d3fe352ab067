"""Every deliberate fault in the coordinator is seen by the simulator or by the unit test that is named beside it."""

import pytest

from kvtier_core.coordinator import endpoints
from tests.coordinator import mutants, test_endpoints, test_primary
from tests.coordinator.mutants import MUTANTS, Mutant
from tests.coordinator.mutate import changed


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name.replace(" ", "-") for mutant in MUTANTS])
def test_a_mutant_is_killed(mutant):
    assert mutants.kill(mutant) is not None, "nothing has seen it"


def test_there_are_many_and_each_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


PLACE = "kvtier_core.coordinator.endpoints:find_ends"


def test_a_mutant_lives_only_while_it_is_wanted():
    find_ends = endpoints.find_ends
    costs = test_endpoints.groups((4, None, "00"))
    with changed(PLACE, "rows <= room", "rows < room"):
        assert [*find_ends(costs, 0)] == []
    assert [*find_ends(costs, 0)] == [8, 4]


@pytest.mark.parametrize(
    ("place", "old"),
    [
        (PLACE, "nowhere()"),
        (PLACE, "needed"),
        (PLACE, "rows < room"),
        (PLACE.replace("find_ends", "no_such"), "0"),
        (PLACE.replace("find_ends", "GroupShape.no_such"), "0"),
    ],
)
def test_a_mutant_whose_place_is_not_found_once_says_so(place, old):
    with pytest.raises(LookupError, match=place), changed(place, old, "1"):
        pass


def test_statements_may_be_left_out_or_replaced_by_several():
    place, old = "kvtier_core.coordinator.endpoints:last_candidate", "return most // unit * unit"
    costs = test_endpoints.groups((4, None, "00"))
    with changed(place, old, ""):
        assert endpoints.last_candidate(costs) is None
    with changed(place, old, "most += 1\nreturn most"):
        assert endpoints.last_candidate(costs) == 9


def test_what_sees_nothing_is_reported_as_a_survivor(monkeypatch, capsys):
    harmless = Mutant(
        name="harmless",
        place=PLACE,
        old="end -= unit",
        new="end = end - unit",
        killer=test_primary.test_c60_a_miss_counts_once_per_request_and_key,
    )
    monkeypatch.setattr(mutants, "MUTANTS", (harmless,))
    assert mutants.main() == 1
    assert "SURVIVES  harmless" in capsys.readouterr().out
