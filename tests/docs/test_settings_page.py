"""docs/reference/settings.md is what the settings models say."""

from pathlib import Path

from kvtier_core.settings import PoolSettings
from kvtier_core.settings.model import TopSettings
from kvtier_core.tier_settings import TierLimits, TierSettings
from tests.docs.pages import update_or_compare
from tests.docs.settings_page import make_page

PAGE = Path(__file__).parents[2] / "docs/reference/settings.md"


def test_c53_the_settings_page_is_what_the_code_says():
    update_or_compare(PAGE, make_page())


def test_c53_every_setting_of_the_core_is_on_the_page():
    rows = [line for line in make_page().splitlines() if line.startswith("| `")]
    for model in (TopSettings, PoolSettings, TierSettings, TierLimits):
        for name in model.model_fields:
            assert name == "limits" or any(row.startswith(f"| `{name}` |") for row in rows), name
    assert not [row for row in rows if "<class" in row or "typing." in row]
