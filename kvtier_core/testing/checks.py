"""Assertions about a tier that is driven through the hook specs."""

from collections.abc import Mapping, Sequence

from kvtier_core.keys import OffloadKey
from kvtier_core.testing.driving import TierDriver
from kvtier_core.testing.rows import RowMaker
from kvtier_core.values import JobResult


def assert_contents(
    tier: TierDriver, stored: Mapping[OffloadKey, bytes], *, absent: Sequence[OffloadKey] = ()
) -> None:
    """Lookup and load agree that *stored* are there, byte for byte, and *absent* are not."""
    keys = [*absent, *stored]
    assert tier.lookup(keys) == [False] * len(absent) + [True] * len(stored)
    loaded = tier.load(keys)
    assert loaded.result.error is None
    assert set(loaded.result.missing) == set(absent)
    assert loaded.rows == dict(stored)


def make_rows(maker: RowMaker, keys: Sequence[OffloadKey]) -> dict[OffloadKey, bytes]:
    """The rows of *keys*."""
    return {key: maker.make(key) for key in keys}


def assert_moved(result: JobResult) -> None:
    """Every key of the job was stored or loaded."""
    assert not result.failed, result.error
    assert result.error is None
    assert not result.missing
