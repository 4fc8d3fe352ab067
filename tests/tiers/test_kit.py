"""The conformance tests have tests too: each fails for a tier that breaks its rule, and none can be replaced."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier_core.testing.tiers import TierTests
from tests.tiers.mutants import KILLED_BY
from tests.tiers.scripted import BatchTier, ScanningTier, Script

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def failed() -> set[tuple[str, str]]:
    """(test class, test) of every test that failed for a mutant."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=no",
            "-rf",
            "-p",
            "no:cacheprovider",
            HERE / "mutants.py",
        ],
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return set(re.findall(r"^FAILED \S+::(Test\w+)::(test_\w+)", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("mutant", KILLED_BY, ids=lambda mutant: mutant.__name__)
def test_a_tier_that_breaks_a_rule_fails_its_test(failed, mutant):
    assert (f"Test{mutant.__name__}", KILLED_BY[mutant]) in failed


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


class TestBatchTier(TierTests):
    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return type("Batching", (BatchTier, ScanningTier), {"script": Script(), "seed": {}})
