"""C37: what a process does with blocks of a shared tier that gave it wrong bytes."""

import pytest

from kvtier_core.values import TierInfo
from kvtier_testing.rows import RowMaker, similar_keys
from tests.tiers.scripted import Gate, Script, ScriptedTier, drive

KEYS = similar_keys(20)
MAKER = RowMaker("kit-namespace", 4000)
BY_CORE = TierInfo(medium="remote", persistent=False, shared=True)
BY_TIER = TierInfo(medium="remote", persistent=False, shared=True, bounded_by="tier")
RIGHT = {key: MAKER.make(key) for key in KEYS}
WRONG = {key: bytes(4096) for key in KEYS}


class BadPath(ScriptedTier):
    """Every byte that comes from the storage is flipped."""

    def load(self, key, into):
        filled = super().load(key, into)
        into[0] ^= 1
        return filled


def settle(tier):
    """Wait until the deletes queued so far are done: a store of any key comes after them on one thread."""
    tier.store({similar_keys(1, seed=99)[0]: bytes(4096)})


@pytest.mark.parametrize("info", [BY_CORE, BY_TIER])
def test_s7_one_node_with_a_bad_path_does_not_empty_the_store_of_all(info, caplog):
    script = Script()
    with drive(script, BadPath, info=info, seed=RIGHT, threads=1) as tier:
        for key in KEYS:
            tier.discard([key])
            settle(tier)
        deleted = KEYS[: len(KEYS) - len(script.blocks.keys() & set(KEYS))]
        assert len(deleted) <= 3
        assert tier.lookup(KEYS) == [False] * len(KEYS), "distrusted here"
        assert tier.load(KEYS).result.missing == tuple(KEYS)
        assert "left to the others" in caplog.text
        for key in KEYS:
            assert tier.store({key: RIGHT[key]}).error is None
    assert sum(len(keys) for method, keys in script.calls if method == "delete") <= 3, "stores replace"
    assert all(script.blocks[key] == RIGHT[key] for key in KEYS)


@pytest.mark.parametrize("info", [BY_CORE, BY_TIER])
def test_s7_a_block_that_is_right_when_read_again_stays_and_is_served(info):
    script = Script()
    with drive(script, info=info, seed=RIGHT, threads=1) as tier:
        tier.store(RIGHT)
        tier.discard(KEYS)
        settle(tier)
        assert script.count("delete") == 0
        assert tier.lookup(KEYS) == [True] * len(KEYS)
        assert tier.load(KEYS).rows == RIGHT


def test_s7_a_block_that_is_wrong_again_is_deleted():
    script = Script()
    with drive(script, info=BY_CORE, seed={**RIGHT, KEYS[3]: WRONG[KEYS[3]]}, threads=1) as tier:
        tier.discard([KEYS[3]])
        settle(tier)
        assert KEYS[3] not in script.blocks
        assert tier.lookup(KEYS[:4]) == [True, True, True, False]


def test_s7_a_block_that_is_right_allows_a_few_more_to_be_deleted():
    script = Script()
    with drive(script, info=BY_CORE, seed={**WRONG, KEYS[3]: RIGHT[KEYS[3]]}, threads=1) as tier:
        for key in KEYS[:8]:
            tier.discard([key])
            settle(tier)
        assert [key for key in KEYS[:8] if key in script.blocks] == [KEYS[3], KEYS[7]]


class SilentPath(ScriptedTier):
    """A load that ends with a fault, as when nothing answers."""

    def load(self, key, into):
        super().load(key, into)
        raise TimeoutError("nothing came")


def test_s7_c31_after_a_fault_no_other_block_is_read_again():
    script = Script()
    with drive(script, SilentPath, info=BY_CORE, seed=RIGHT, threads=1) as tier:
        tier.discard(KEYS)
        settle(tier)
        assert script.count("load") == 1
        assert script.count("delete") == 0
        assert tier.lookup(KEYS) == [False] * len(KEYS), "distrusted here"


def test_s7_c34_once_the_tier_is_shut_down_no_other_block_is_read_again():
    script = Script()
    with drive(script, info=BY_CORE, seed=RIGHT, threads=1) as tier, Gate("load") as gate:
        script.before = gate
        tier.discard(KEYS)
        gate.wait_entered()
        assert not tier.shutdown(0.0)
        gate.open()
        assert tier.shutdown()
    assert script.count("load") == 1


def test_s7_a_tier_of_this_process_alone_is_told_to_delete_at_once():
    script = Script()
    with drive(script, seed=WRONG, threads=1) as tier:
        tier.discard(KEYS)
        settle(tier)
        assert script.blocks.keys().isdisjoint(KEYS)
        assert script.count("load") == 0
