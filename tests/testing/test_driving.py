"""The driver of tests: it waits for the jobs that it is asked for, and for no others."""

import pytest

from kvtier_testing.rows import similar_keys
from tests.tiers.scripted import Script, drive, row

A, B, *_ = similar_keys(4)


def test_any_of_several_jobs_is_waited_for_and_each_is_told_once():
    with drive(Script()) as tier:
        jobs = {tier.start_store({A: row(1)}), tier.start_store({B: row(2)})}
        while jobs:
            result = tier.wait_any(jobs)
            assert result.error is None
            jobs.remove(result.job_id)
        assert not tier.unanswered()


def test_what_can_not_come_is_not_waited_for():
    with drive(Script()) as tier:
        job = tier.start_store({A: row(1)})
        tier.wait(job)
        with pytest.raises(AssertionError, match="no job to wait for"):
            tier.wait_any([])
        with pytest.raises(AssertionError, match=f"{job}.* never submitted, or .* been waited for"):
            tier.wait(job)
