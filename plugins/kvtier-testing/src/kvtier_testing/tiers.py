"""One test class for every tier: what the contract asks of a tier, at either interface.

A tier's own test file subclasses ``TierTests`` and says which tier and with which settings::

    class TestMyTier(TierTests):
        @pytest.fixture
        def tier_class(self):
            return MyTier

        @pytest.fixture
        def tier_settings(self, tmp_path):
            return {"root": tmp_path}

``tier_settings`` are the tier's own settings; made once a test, so that every tier opened in one test meets the same
storage. What applies is taken from the tier's ``info``. A test may not be replaced in a subclass; one that can't pass
is marked ``pytest.mark.xfail`` with a reason.
"""

from kvtier_testing.blocking_rules import BlockingRules
from kvtier_testing.bound_rules import BoundRules
from kvtier_testing.checks import assert_contents
from kvtier_testing.fixtures import OpenTier
from kvtier_testing.job_rules import JobRules
from kvtier_testing.life_rules import LifeRules
from kvtier_testing.storage_rules import StorageRules

__all__ = ["OpenTier", "TierTests", "assert_contents"]


class TierTests(JobRules, LifeRules, BoundRules, StorageRules, BlockingRules):
    """The tests. ``TierFixtures`` says what a subclass provides, and what it may set."""

    def __init_subclass__(cls) -> None:
        """Refuse subclasses that replace a test by another of that name."""
        super().__init_subclass__()
        for name, test in vars(cls).items():
            if not name.startswith("test_") or not hasattr(TierTests, name):
                continue
            marks = getattr(test, "pytestmark", ())
            if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                raise TypeError(
                    f"{cls.__name__}.{name} replaces a test of TierTests; mark it xfail with a reason"
                )
