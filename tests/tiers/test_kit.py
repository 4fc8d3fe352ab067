"""The conformance tests have tests too: each fails for a tier that breaks its rule, and none can be replaced."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier_testing.tiers import TierTests
from tests.tiers.scripted import BatchTier, ScanningTier, Script

pytestmark = pytest.mark.timeout(900)  # the kit is run on every mutant first

HERE = Path(__file__).parent

KILLED_BY = {
    "ShortKeys": "test_c52_keys_that_differ_in_their_last_bytes_are_apart",
    "GroupBlind": "test_k12_o1_groups_of_one_block_hash_are_apart",
    "SharedDict": "test_k13_o4_instances_share_nothing",
    "KeepsReference": "test_c29_a_store_keeps_no_reference_to_its_buffer",
    "AbsentIsFault": "test_c52_contains_and_load_agree_and_absence_is_no_fault",
    "HoldsAll": "test_c52_contains_and_load_agree_and_absence_is_no_fault",
    "AnswersWithInts": "test_c52_contains_and_load_agree_and_absence_is_no_fault",
    "DeletesNothing": "test_c52_delete_removes_what_is_named_and_nothing_else",
    "KeepsFirst": "test_c52_a_later_store_replaces_the_block",
    "HalfLoad": "test_c29_rows_come_back_whole_and_proven",
    "DropsProof": "test_c29_rows_come_back_whole_and_proven",
    "Forgetful": "test_k7_o1_a_persistent_tier_has_its_blocks_after_a_restart",
    "ScanForgets": "test_c52_scan_finds_every_block_once",
    "ScanSaysNow": "test_c52_scan_finds_every_block_once",
    "NamespaceBlind": "test_c02_namespaces_are_apart",
    "WritesLate": "test_c29_buffers_are_left_alone_after_the_result",
    "ResultTwice": "test_c30_every_job_has_exactly_one_result",
    "NothingForEmptyJobs": "test_c30_every_job_has_exactly_one_result",
    "ShortLookup": "test_c10_a_lookup_has_one_bool_a_key_in_order",
    "ResetKeeps": "test_k7_o4_c34_after_a_reset_everything_misses",
    "InFlightSurfaces": "test_k7_o4_c34_after_a_reset_everything_misses",
    "MissingAsFailed": "test_c30_absent_keys_are_missing_and_not_failed",
    "DiscardsNothing": "test_c03_discarded_blocks_are_not_handed_out_until_they_are_stored_again",
    "ReportsNoEviction": "test_c10_a_tier_that_reports_its_contents_reports_all_of_them",
    "CancelForgets": "test_c30_cancelled_jobs_have_their_result",
}


@pytest.fixture(scope="module")
def failures() -> list[tuple[str, str, str]]:
    """(test class, test, message) of every test that failed for a mutant."""
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
        timeout=800,
        check=False,
        env={**os.environ, "COLUMNS": "1000"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return re.findall(r"^FAILED \S+::(Test\w+)::(test_\w+)(?: - (.*))?$", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def failed(failures) -> set[tuple[str, str]]:
    """(test class, test) of every test that failed for a mutant."""
    return {(test_class, test) for test_class, test, _ in failures}


@pytest.mark.parametrize("mutant", KILLED_BY)
def test_a_tier_that_breaks_a_rule_fails_its_test(failed, mutant):
    assert (f"Test{mutant}", KILLED_BY[mutant]) in failed


def test_every_mutant_is_looked_at(failed):
    assert {f"Test{mutant}" for mutant in KILLED_BY} == {test_class for test_class, _ in failed}


def test_every_failure_says_what_is_wrong(failures):
    """In words, and shortly: a row may have megabytes."""
    ours = [
        failure for failure in failures if failure[2].startswith("Assert")
    ]  # the rest the mutant raised itself
    assert ours
    for test_class, test, message in ours:
        assert re.search(r"Error: .*\w+ \w+", message), f"{test_class}.{test} says only {message!r}"
        assert len(message) < 400, f"{test_class}.{test}"


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
