"""Sizes and times as people write them (C54)."""

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.transfer.waiting import LONGEST_S, bounded
from kvtier_core.units import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 << 30),
        ("512 MB", 512_000_000),
        ("1.5GiB", 3 << 29),
        ("1 kib", 1024),
        ("2TiB", 2 << 40),
        ("3tb", 3 * 10**12),
        ("17", 17),
        ("17B", 17),
        (" 4096 ", 4096),
        (0, 0),
        (4096, 4096),
        (4096.0, 4096),
    ],
)
def test_c54_sizes(text, count):
    assert parse_size(text) == count
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("250ms", 0.25),
        ("2h", 7200.0),
        ("5 min", 300.0),
        ("5m", 300.0),
        ("1d", 86400.0),
        (2, 2.0),
        (0.5, 0.5),
    ],
)
def test_c54_durations(text, seconds):
    assert parse_duration(text) == seconds


NONSENSE = [
    "",
    "GiB",
    "8 elephants",
    "-1",
    "-1GiB",
    "1e9",
    "nan",
    "inf",
    "8GiB8",
    "1..5GB",
    -1,
    -0.5,
    math.nan,
    math.inf,
    True,
    None,
    [8],
]


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_c54_nonsense_is_refused_with_an_example(value):
    with pytest.raises(ValueError, match="8GiB"):
        parse_size(value)
    with pytest.raises(ValueError, match="30s"):
        parse_duration(value)


def test_c54_parts_of_a_byte_are_refused():
    for value in ("0.3B", 0.5, "1.0001KB"):
        with pytest.raises(ValueError, match="whole number of bytes"):
            parse_size(value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_c54_sizes_for_people(count, text):
    assert format_size(count) == text


@given(st.integers(0, 1 << 45))
def test_c54_bytes_survive_their_own_text(count):
    assert parse_size(f"{count}B") == count


@pytest.mark.parametrize("huge", [10**400, float("inf"), float("nan"), "9" * 400, "9" * 400 + "TiB"])
def test_c54_quantities_beyond_all_measure_are_refused(huge):
    for parse in (parse_size, parse_duration):
        with pytest.raises(ValueError, match="such as"):
            parse(huge)


@pytest.mark.parametrize("value", ["40000d", 4e18])
def test_c54_times_that_no_lock_can_wait_for_are_refused(value):
    with pytest.raises(ValueError, match="not beyond all measure"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("said", "waited"),
    [(1.5, 1.5), (0, 0), (-1, 0), (math.nan, 0), (math.inf, LONGEST_S), (10**12, LONGEST_S)],
)
def test_any_time_to_wait_becomes_one_that_can_be_waited(said, waited):
    assert bounded(said) == waited <= threading.TIMEOUT_MAX
