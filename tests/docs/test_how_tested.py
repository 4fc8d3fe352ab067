"""The page about testing says how much there is of everything, and counts right."""

import re
from pathlib import Path

from kvtier_core.values import MissReason
from tests.coordinator.mutants import MUTANTS
from tests.sim.outcomes import OUTCOMES
from tests.testing.kit_mutants.cases import MUTANTS as BROKEN_TIERS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_counts_are_those_of_the_code():
    page = (DOCS / "how-tested.md").read_text()
    assert re.findall(r"The (\d+) outcomes", page) == [str(len(OUTCOMES))]
    assert re.findall(r"(\d+) deliberate faults", page) == [str(len(MUTANTS))]
    assert re.findall(r"(\d+) broken tiers", page) == [str(len(BROKEN_TIERS))]


def test_c60_every_reason_for_a_miss_is_explained():
    page = (DOCS / "explanation" / "life-of-a-block.md").read_text()
    explained = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(explained) == sorted(reason.value for reason in MissReason)
