"""docs/reference/tiers.md is what the tier interface's code says."""

from pathlib import Path

from kvtier_core import tier
from tests.docs.pages import update_or_compare
from tests.docs.tiers_page import make_page

PAGE = Path(__file__).parents[2] / "docs/reference/tiers.md"


def test_c56_the_page_of_the_tier_interface_is_what_the_code_says():
    update_or_compare(PAGE, make_page())


def test_c56_every_ability_and_value_of_the_interface_is_on_the_page():
    headings = [line.strip("# `") for line in make_page().splitlines() if line.startswith("###")]
    values = {
        "BlockInfo",
        "JobResult",
        "OffloadPolicy",
        "PoolView",
        "RequestInfo",
        "TierContext",
        "TierInfo",
        "TierJob",
    }
    abilities = {name for name in tier.__all__ if name.startswith("Supports")}
    assert values | abilities <= set(headings)
