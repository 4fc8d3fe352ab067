"""When the core asks a shared tier whether others have stored a block, before it stores it (S11)."""

from collections.abc import Iterator, Sequence

import pytest

from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierInfo
from kvtier_testing.rows import similar_keys
from tests.tiers.engine import TierEngine
from tests.tiers.scripted import ROW, BatchTier, Script, ScriptedTier, drive, row

KEYS = similar_keys(40)
BY_CORE = TierInfo(medium="remote", persistent=False, shared=True)
BY_TIER = TierInfo(medium="remote", persistent=False, shared=True, bounded_by="tier")
SHARED = pytest.mark.parametrize("info", [BY_CORE, BY_TIER])
OLD = {key: row(number) for number, key in enumerate(KEYS)}
NEW = {key: row(number + 1000) for number, key in enumerate(KEYS)}


class Asked(ScriptedTier):
    """It says which blocks it holds."""

    def holds(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        answer: Sequence[bool] = self._call("holds", keys, lambda: [key in self._blocks for key in keys])
        return answer


class AskedBatch(Asked, BatchTier):
    """The same with batches."""


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    assert script.violations == []


def some(rows, keys):
    return {key: rows[key] for key in keys}


@SHARED
@pytest.mark.parametrize("base", [Asked, AskedBatch])
def test_s11_what_others_stored_is_held_and_not_stored(script, base, info):
    with drive(script, base, info=info, seed=some(OLD, KEYS[:5]), threads=1) as tier:
        result = tier.store(some(NEW, KEYS[:8]))
        assert (result.error, result.held) == (None, tuple(KEYS[:5]))
        assert script.blocks == {**some(OLD, KEYS[:5]), **some(NEW, KEYS[5:8])}
        assert tier.store(some(NEW, KEYS[:8])).held == tuple(KEYS[:8])
        assert tier.lookup(KEYS[:9]) == [True] * 8 + [False]


@SHARED
def test_s11_what_gave_wrong_bytes_or_could_not_be_loaded_is_stored_over(script, info):
    with drive(script, Asked, info=info, seed=OLD, threads=1) as tier:
        tier.discard(KEYS[:8])
        script.before = refuse_loads
        assert tier.load(KEYS[8:16]).result.failed == tuple(KEYS[8:16])
        script.before = lambda _method, _keys: None
        for key in KEYS[:16]:  # each as a request of its own, which asks again
            assert tier.store(some(NEW, [key])).held == ()
        assert script.blocks == {**OLD, **some(NEW, KEYS[:16])}
        assert tier.store(some(OLD, KEYS[:16])).held == tuple(KEYS[:16]), "they are right now"


@SHARED
def test_s11_what_the_tier_holds_and_calls_not_whole_when_it_loads_it_is_stored_over(script, info):
    with drive(script, Asked, info=info, seed=some(OLD, KEYS[:4]), threads=1) as tier:
        script.before = lambda method, _keys: False if method == "load" else None
        assert tier.load(KEYS[:4]).result.missing == tuple(KEYS[:4])
        script.before = lambda _method, _keys: None
        for key in KEYS[:4]:
            assert tier.store(some(NEW, [key])).held == ()
        assert script.blocks == some(NEW, KEYS[:4])


def refuse_loads(method: str, _keys: Sequence[OffloadKey]) -> None:
    if method == "load":
        raise OSError("unreadable")


@pytest.mark.parametrize("answer", [[False], [None], [OSError("no answer")], OSError("no answer")])
def test_s11_a_block_that_could_not_be_asked_about_is_stored(script, answer):
    def before(method: str, _keys: Sequence[OffloadKey]) -> object:
        if method == "holds" and isinstance(answer, Exception):
            raise answer
        return answer if method == "holds" else None

    script.before = before
    with drive(script, Asked, info=BY_CORE, seed=OLD) as tier:
        result = tier.store(some(NEW, KEYS[:3]))
        assert (result.error, result.held) == (None, ())
        assert some(script.blocks, KEYS[:3]) == some(NEW, KEYS[:3])


@pytest.mark.parametrize(("info", "ttl"), [(TierInfo(medium="memory"), None), (BY_CORE, 100.0)])
def test_s11_nobody_asks_where_nobody_else_stores_or_blocks_age(script, info, ttl):
    with drive(script, Asked, info=info, seed=OLD, ttl=ttl) as tier:
        assert tier.store(some(NEW, KEYS[:3])).held == ()
        assert some(script.blocks, KEYS[:3]) == some(NEW, KEYS[:3])
        assert script.count("holds") == 0


def test_s11_blocks_of_others_count_within_the_capacity(script):
    with drive(script, Asked, info=BY_CORE, seed=some(OLD, KEYS[:4]), capacity_blocks=4) as tier:
        assert tier.store(some(NEW, KEYS[:4])).held == tuple(KEYS[:4])
        assert tier.store(some(NEW, KEYS[4:6])).error is None
        assert len(script.blocks) == 4


def test_s11_behind_the_first_block_that_is_not_there_a_request_asks_no_more(script):
    tier_class = type("Scripted", (Asked,), {"script": script, "seed": {}, "info": BY_CORE})
    with TierEngine(tier_class, threads=1) as engine:
        script.blocks.update((key, bytes(ROW)) for key in KEYS[:5])
        engine.store("one", KEYS[:16])
        assert script.count("holds") == 6
        assert script.count("store") == 11
        engine.store("two", KEYS[:30])
        assert script.count("holds") == 7, "each request asks"
        assert script.count("store") == 25
