"""Extents and the root's number that somebody takes away or changes while a tier has them open (C30, C33)."""

import errno
import os
from pathlib import Path

import pytest

from tests.tiers.extents import (
    KEYS,
    MIB,
    direct,
    drive,
    extent_files,
    load,
    rows,
    store,
    used_bytes,
    wait_until,
)

CAPACITY = 16 * MIB
HELD = KEYS[:50]  # in extents of 30
MORE = KEYS[60:90]
WAYS = pytest.mark.parametrize(
    "way",
    [
        Path.unlink,
        lambda path: path.rename(path.with_suffix(".away")),
        lambda path: os.truncate(path, 0),
    ],
    ids=["removed", "renamed", "emptied"],
)


def open_extents(root: Path) -> list[str]:
    """The extents of *root* that this process has open, by the names they had."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [target for target in targets if target.startswith(str(root)) and ".ext" in target]


def losses(said: list[str]) -> list[str]:
    return [text for text in said if "their blocks are gone, and their room is given back" in text]


@WAYS
def test_s8_c32_what_is_stored_after_an_extent_was_taken_away_is_there_after_a_restart(root, way, warnings):
    with drive(root, capacity=CAPACITY, refresh="1h") as tier:  # it must not be a look that notices
        assert tier.load(HELD).rows == rows(*HELD)
        for file in extent_files(root):
            way(file)
        result = tier.store(rows(*MORE))
        assert result.failed
        assert "removed or exchanged while it was written" in str(result.error)
        assert tier.store(rows(*result.failed)).error is None
        assert tier.load(MORE).rows == rows(*MORE)
    with drive(root, capacity=CAPACITY) as tier:
        assert tier.load(MORE).rows == rows(*MORE)
    assert losses(warnings()) != []


@WAYS
def test_s8_c33_an_extent_that_was_taken_away_gives_its_room_back(root, way, warnings):
    with drive(root, capacity=CAPACITY) as tier:
        assert tier.load(HELD).rows == rows(*HELD)
        assert open_extents(root)
        for file in extent_files(root):
            way(file)
        wait_until(lambda: tier.lookup(HELD) == [False] * len(HELD), "the blocks are known to be gone")
        wait_until(lambda: not open_extents(root), "nothing is kept open")
        assert tier.store(rows(*HELD)).error is None
        assert tier.load(HELD).rows == rows(*HELD)
        for file in (root / "ns").glob("*.away"):
            file.unlink()
        assert used_bytes(root) <= CAPACITY
    assert 1 <= len(losses(warnings())) <= 2  # a look may come between the two extents


def test_s8_an_extent_that_another_process_gave_back_is_no_loss_to_warn_of(tmp_path, warnings):
    with drive(tmp_path, capacity=CAPACITY, extent_size="1MiB") as tier:
        assert tier.store(rows(*KEYS[:150])).error is None
        assert tier.load(KEYS[:150]).rows == rows(*KEYS[:150])
        with drive(
            tmp_path, capacity=CAPACITY // 2, extent_size="1MiB"
        ):  # removes what is beyond its own capacity
            wait_until(lambda: not all(tier.lookup(KEYS[:150])), "blocks are known to be gone")
            wait_until(
                lambda: not any("deleted" in name for name in open_extents(tmp_path)), "nothing is kept open"
            )
    assert losses(warnings()) == []


@pytest.mark.parametrize("content", [b"00000001", b"7fffffff"])
def test_s6_c33_a_root_whose_number_is_damaged_while_running_goes_on_within_refresh(root, content, warnings):
    with drive(root, capacity=CAPACITY) as tier, drive(root, capacity=CAPACITY) as other:
        (root / ".kvtier" / "id").write_bytes(content)
        for each in (tier, other):
            wait_until(lambda each=each: each.store(rows(*MORE)).error is None, "blocks are stored again")
            # Not at once: both stored these, and a block that is given up as the second of two is a miss until then.
            wait_until(
                lambda each=each: each.load([*HELD, *MORE]).rows == rows(*HELD, *MORE), "all blocks are there"
            )
    assert [text for text in warnings() if "made the index anew" in text] != []
    with drive(root, capacity=CAPACITY) as tier:
        assert tier.load([*HELD, *MORE]).rows == rows(*HELD, *MORE)


def test_s6_c33_an_unreadable_number_costs_nothing_while_running(root):
    with drive(root, capacity=CAPACITY) as tier:
        (root / ".kvtier" / "id").write_bytes(b"\xff\x00noise")
        assert tier.store(rows(*MORE)).error is None
        assert tier.load([*HELD, *MORE]).rows == rows(*HELD, *MORE)


@pytest.mark.parametrize("damage", ["number", "index"])
def test_c33_slots_claimed_in_a_former_index_are_not_written(root, damage, monkeypatch):
    tier = direct(root, capacity=CAPACITY)
    blocks = tier._store
    make_room = blocks._make_room

    def claim_before_the_index_is_made_anew(count):
        claim = make_room(count)
        monkeypatch.undo()
        if damage == "number":
            (root / ".kvtier" / "id").write_bytes(b"00000001")
        else:
            blocks.opened.index.database.damaged("as the test says")
        tier.follow()
        assert store(tier, *MORE) == [True] * len(MORE)
        return claim

    monkeypatch.setattr(blocks, "_make_room", claim_before_the_index_is_made_anew)
    outcomes = store(tier, *KEYS[100:110])
    assert [outcome.errno for outcome in outcomes if isinstance(outcome, OSError)] == [errno.ESTALE] * 10
    assert load(tier, *HELD, *MORE) == rows(*HELD, *MORE)
    assert store(tier, *KEYS[100:110]) == [True] * 10
    tier.close()
