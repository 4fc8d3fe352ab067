"""One test class for every tier: what the contract asks of a tier, tried through the hook specs.

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
from kvtier_testing.checks import assert_contents
from kvtier_testing.fixtures import OpenTier
from kvtier_testing.hook_rules import HookRules

__all__ = ["OpenTier", "TierTests", "assert_contents"]


class TierTests(HookRules, BlockingRules):
    """The tests. Set ``payload_bytes`` to try blocks of another size, ``full_rounds`` where calls are slow."""

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
