"""The table of broken tiers: each with the rule of the kit that has to kill it, and words of its message."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from kvtier_core.blocktier import BlockTier
from kvtier_testing.tiers import TierTests

_T = TypeVar("_T", bound=type[Any])
HANGS = 2.0
"""Seconds of patience with a tier that hangs for ever."""


@dataclass(frozen=True)
class Mutant:
    """A broken tier, the test that must fail for it, and words that its message must have."""

    cls: type[Any]
    rule: str
    says: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Of its test class."""

    @property
    def name(self) -> str:
        return self.cls.__name__

    def __str__(self) -> str:
        return f"{self.test_class}-{self.rule}"

    @property
    def level(self) -> str:
        """The interface that it is written on."""
        return "blocking" if issubclass(self.cls, BlockTier) else "hook specs"

    @property
    def test_class(self) -> str:
        """The name of the test class that tries it."""
        return f"Test{self.level.title().replace(' ', '')}{self.name}"


MUTANTS: list[Mutant] = []


def killed_by(rule: str, says: str, **attributes: Any) -> Callable[[_T], _T]:
    """Registers a broken tier."""

    def register(cls: _T) -> _T:
        MUTANTS.append(Mutant(cls, rule, says, attributes))
        return cls

    return register


class KitTests(TierTests):
    """The kit, for tiers with or without a setting ``root``."""

    @pytest.fixture
    def tier_settings(self, tier_class, tmp_path):
        return {"root": tmp_path / "root"} if "root" in tier_class.Settings.model_fields else {}

    @pytest.fixture
    def unusable_settings(self, tier_class, tmp_path):
        if "root" not in tier_class.Settings.model_fields:
            return None
        (tmp_path / "file").touch()
        return {"root": tmp_path / "file" / "below"}


def make_tests(name: str, cls: type[Any], **attributes: Any) -> type[KitTests]:
    """The kit's test class for a tier."""
    return type(name, (KitTests,), {"tier_class": pytest.fixture(lambda self: cls), **attributes})
