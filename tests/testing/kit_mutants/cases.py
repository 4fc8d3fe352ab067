"""The kit's tests for every mutant. ``test_kit`` runs those that must fail, in a process of their own."""

from tests.testing.kit_mutants import blocking, hooks, storage
from tests.testing.kit_mutants.table import MUTANTS, make_tests

__all__ = ["MUTANTS", "blocking", "hooks", "storage"]

for _mutant in MUTANTS:
    globals()[_mutant.test_class] = make_tests(_mutant.test_class, _mutant.cls, **_mutant.attributes)
