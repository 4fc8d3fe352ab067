"""Assertions about a tier. What they say when they fail is short, whatever the size of a row."""

from collections.abc import Collection, Mapping, Sequence

from kvtier_core.keys import OffloadKey
from kvtier_core.values import JobResult
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import RowMaker

KEYS_A_LOAD = 32
"""Few enough for the rows that a test has."""


def assert_contents(
    tier: TierDriver, stored: Mapping[OffloadKey, bytes], *, absent: Sequence[OffloadKey] = ()
) -> None:
    """Lookup and load agree that *stored* are there, byte for byte, and *absent* are not."""
    keys = [*absent, *stored]
    assert_each(
        tier.lookup(keys),
        [False] * len(absent) + [True] * len(stored),
        "the lookup of absent and stored keys",
    )
    missing: list[OffloadKey] = []
    rows: dict[OffloadKey, bytes] = {}
    for begin in range(0, len(keys), KEYS_A_LOAD):
        loaded = tier.load(keys[begin : begin + KEYS_A_LOAD])
        assert loaded.result.error is None, f"the load failed: {loaded.result.error}"
        missing += loaded.result.missing
        rows |= loaded.rows
    assert_same_keys(missing, absent, "the keys that the load reported missing")
    assert_rows(rows, stored)


def assert_rows(got: Mapping[OffloadKey, bytes], stored: Mapping[OffloadKey, bytes]) -> None:
    """Exactly the *stored* rows were loaded, byte for byte."""
    assert_same_keys(got, stored, "the keys that were loaded")
    assert_each([got[key] for key in stored], list(stored.values()), "the loaded rows")


def assert_whole(got: Mapping[OffloadKey, bytes], stored: Mapping[OffloadKey, bytes]) -> None:
    """Whatever was loaded is what was stored under that key."""
    assert_rows(got, {key: stored[key] for key in got if key in stored})


def assert_same_keys(got: Collection[OffloadKey], expected: Collection[OffloadKey], what: str) -> None:
    """The same keys, in any order."""
    surplus, lacking = set(got) - set(expected), set(expected) - set(got)
    assert set(got) == set(expected), (
        f"{what}: {len(set(expected))} expected; {len(lacking)} of them are not there, {len(surplus)} others are"
    )


def assert_each(got: Sequence[object], expected: Sequence[object], what: str) -> None:
    """One by one the same. The message shows the first difference."""
    assert len(got) == len(expected), f"{what}: {len(got)} of them, not {len(expected)}"
    wrong = [index for index, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1]]
    assert not wrong, (
        f"{what}: {len(wrong)} of {len(expected)} are wrong; "
        f"number {wrong[0]} {_difference(got[wrong[0]], expected[wrong[0]])}"
    )


def _difference(got: object, expected: object) -> str:
    if isinstance(expected, bytes | bytearray) and got is None:
        return "is not there"
    if not isinstance(got, bytes | bytearray) or not isinstance(expected, bytes | bytearray):
        return f"is {_short(got)}, and has to be {_short(expected)}"
    if len(got) != len(expected):
        return f"has {len(got)} bytes of {len(expected)}"
    offset = next(index for index, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
    return f"has other bytes, from byte {offset} of {len(expected)} on"


def _short(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes | bytearray) else repr(value)


def make_rows(maker: RowMaker, keys: Sequence[OffloadKey]) -> dict[OffloadKey, bytes]:
    """The rows of *keys*."""
    return {key: maker.make(key) for key in keys}


def assert_moved(result: JobResult) -> None:
    """Every key of the job was stored or loaded."""
    assert not result.failed, f"{len(result.failed)} keys of the job failed: {result.error}"
    assert result.error is None, f"the job reported an error: {result.error}"
    assert not result.missing, f"{len(result.missing)} keys of the job were reported missing"
