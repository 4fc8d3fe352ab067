"""What a hint may ask for, and how those of strangers are read."""

from decimal import Decimal

import pytest

from kvtier_core.hints import MAX_ACTIONS, MAX_SECONDS, Hints, read_hints


def test_hints_of_every_kind_are_read():
    hints = read_hints(
        [
            ("kv.retain", "1.0", {"seconds": 60, "priority": 7}),
            ("pin", "1", {"seconds": 1.5, "bytes": 1 << 20}),
            ("prefetch", "1", {}),
            ("kv.drop", "1.2", {}),
        ]
    )
    assert hints == Hints(
        retain_s=60, priority=7, pin_s=1.5, pin_bytes=1 << 20, prefetch=True, drop=True, num_unknown=0
    )
    assert hints.count() == {"retain": 1, "pin": 1, "prefetch": 1, "drop": 1, "unknown": 0}


@pytest.mark.parametrize(
    "action",
    [
        ("warm", "1", {}),
        ("pin", "2", {"seconds": 1}),
        ("pin", 1, {"seconds": 1}),
        ("pin", "0.1", {"seconds": 1}),
        ("pin", "1", {}),
        ("pin", "1", {"seconds": 0}),
        ("pin", "1", {"seconds": -1}),
        ("pin", "1", {"seconds": "60"}),
        ("pin", "1", {"seconds": True}),
        ("pin", "1", {"seconds": float("nan")}),
        ("pin", "1", {"seconds": None}),
        ("pin", "1", {"seconds": 1, "bytes": -1}),
        ("pin", "1", {"seconds": 1, "bytes": 1.5}),
        ("pin", "1", {"seconds": 1, "tier": "disk"}),
        ("pin", "1", None),
        ("pin", "1", [1]),
        (["pin"], "1", {"seconds": 1}),
        ("retain", "1", {"priority": 1}),
        ("retain", "1", {"seconds": 1, "priority": 101}),
        ("retain", "1", {"seconds": 1, "priority": 0.5}),
        ("prefetch", "1", {"seconds": 1}),
    ],
)
def test_a_strange_hint_is_counted_and_the_others_hold(action):
    hints = read_hints([("retain", "1", {"seconds": 3}), action, ("drop", "1", {})])
    assert hints == Hints(retain_s=3, drop=True, num_unknown=1)


def test_f4_a_payload_that_raises_what_it_likes_is_counted():
    assert read_hints([("pin", "1", {"seconds": Decimal("NaN")})]) == Hints(num_unknown=1)


def test_f4_of_a_flood_of_hints_the_first_are_read():
    flood = [("retain", "1", {"seconds": 3}), *[("pin", "1", {"seconds": 1})] * 100_000]
    assert read_hints(flood) == Hints(retain_s=3, pin_s=1, num_unknown=100_001 - MAX_ACTIONS)


def test_a_hint_ends_after_an_hour():
    assert read_hints([("pin", "1", {"seconds": 1e9})]).pin_s == MAX_SECONDS
    assert Hints(retain_s=float("inf")).retain_s == MAX_SECONDS
    assert read_hints([("pin", "1", {"seconds": 10**400})]) == Hints(pin_s=MAX_SECONDS)


def test_of_two_of_a_kind_the_last_holds():
    assert read_hints([("pin", "1", {"seconds": n}) for n in (1, 2)]) == Hints(pin_s=2)


@pytest.mark.parametrize("wrong", [{"pin_s": -1}, {"priority": 101}, {"pin_bytes": 0.5}, {"drop": 1}])
def test_a_programmer_is_told(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Hints(**wrong)
