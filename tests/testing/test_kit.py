"""The kit has tests too: each rule fails for the tiers that break it and says so, and none can be replaced."""

import inspect
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtier_testing.tiers import TierTests
from tests.testing.kit_mutants import blocking, hooks, storage
from tests.testing.kit_mutants.right import RIGHT
from tests.testing.kit_mutants.table import MUTANTS, make_tests
from tests.tiers.scripted import BatchTier, ScanningTier, Script

__all__ = ["blocking", "hooks", "storage"]

pytestmark = pytest.mark.timeout(900)  # the kit is run on every mutant first

HERE = Path(__file__).parent
CASES = HERE / "kit_mutants/cases.py"
RULES = {name: test for name, test in inspect.getmembers(TierTests) if name.startswith("test_")}

for _tier in RIGHT:
    globals()[f"Test{_tier.__name__}"] = make_tests(f"Test{_tier.__name__}", _tier)


class TestBatchTier(TierTests):
    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return type("Batching", (BatchTier, ScanningTier), {"script": Script(), "seed": {}})


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    """By test class: what the rule said that was to kill its mutant."""
    report = tmp_path_factory.mktemp("kit") / "report.xml"
    tests = [f"{CASES}::{mutant.test_class}::{mutant.rule}" for mutant in MUTANTS]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n2",  # those that hang cost time and no work
            "--tb=short",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *tests,
        ],
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )
    assert done.returncode == 1, done.stdout[-5000:] + done.stderr
    return {
        case.attrib["classname"].rpartition(".")[2]: _message(failure)
        for case in ET.parse(report).iter("testcase")
        for failure in case.iter("failure")
    }


def _message(failure: ET.Element) -> str:
    """What the rule said. The attribute of that name is cut short."""
    said = (failure.text or "").rpartition("AssertionError: ")[2].splitlines()
    return "\n".join([said[0], *(line[4:] for line in said[1:] if line.startswith("E   "))])


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_i21_a_broken_tier_is_killed_by_its_rule(said, mutant):
    message = said.get(mutant.test_class)
    assert message is not None, f"{mutant.name} passes {mutant.rule}"
    assert mutant.says in message


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_i21_every_message_is_the_rule_in_plain_words(said, mutant):
    """And short: a row may have megabytes."""
    message = said[mutant.test_class]
    assert "\n  Rule C" in message
    assert "\n  What to do: " in message
    assert len(message) < 1200


@pytest.mark.parametrize("name", ["BlockingNoRoom", "HookSpecsNoRoomOnTheHooks"])
def test_i21_where_a_tier_raises_its_line_comes_before_the_advice(said, name):
    message = said[f"Test{name}"]
    assert "[Errno 28] no room\n  Raised by the tier in " in message
    assert (
        "\n  What to do: See why that line raises. If this rule's own case raises there: Store and load"
        in message
    )


@pytest.mark.parametrize("name", ["BlockingHangsInLoad", "BlockingHangsInOpen", "HookSpecsHangsInLookup"])
def test_i21_where_a_call_hangs_the_rule_is_that_it_returns(said, name):
    message = said[f"Test{name}"]
    assert "\n  Rule C31: Each call of a tier returns or raises." in message
    assert "\n  What to do: Give every call of the storage's client a timeout" in message


def test_i21_there_are_mutants_enough_at_both_levels():
    levels = Counter(mutant.level for mutant in MUTANTS)
    assert sum(levels.values()) >= 60
    assert min(levels.values()) >= 25


def test_i21_every_rule_kills_a_mutant():
    assert set(RULES) - {mutant.rule for mutant in MUTANTS} == {
        "test_c30_a_load_meets_the_store_of_its_keys",  # as BESIDE, within one instance
        "test_c52_a_call_that_fails_for_a_moment_is_made_again",  # the core's part: see test_adapter_retries
    }


@pytest.mark.parametrize("name", RULES)
def test_i21_every_rule_has_a_number_and_says_what_to_do(name):
    doc = inspect.getdoc(RULES[name])
    assert hasattr(RULES[name], "__wrapped__"), "it lacks @rule"
    assert name.startswith("test_c")
    assert doc is not None
    assert doc.count("\n\n") == 1, "two paragraphs: the rule, and what to do"


def test_a_test_may_not_be_replaced():
    name = "test_c10_a_lookup_has_one_bool_a_key_in_order"
    with pytest.raises(TypeError, match=f"Cheat.{name} replaces a test of TierTests"):
        type("Cheat", (TierTests,), {name: lambda self: None})


def test_a_test_may_be_marked_as_an_expected_failure_with_a_reason():
    name = "test_c10_a_lookup_has_one_bool_a_key_in_order"

    @pytest.mark.xfail(reason="this tier's server has a bug")
    def test(self):
        raise NotImplementedError

    assert hasattr(type("Honest", (TierTests,), {name: test}), name)
