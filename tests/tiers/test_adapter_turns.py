"""Nobody waits for all of somebody else's work: loads and lookups take turns."""

import itertools

import pytest

from kvtier_core.manager.blocking.work import WorkQueue
from kvtier_core.values import TierInfo
from kvtier_testing.rows import similar_keys
from tests.tiers.scripted import ROW, BatchTier, Gate, Script, ScriptedTier, drive, row

ASKED = TierInfo(medium="memory", persistent=True, bounded_by="tier")
MANY = 1000
KEYS = similar_keys(64 + MANY + 1)
LAST = KEYS[-1]


def buffers(count: int) -> list[bytearray]:
    return [bytearray(ROW) for _ in range(count)]


def start(tier, kind: str, keys) -> int:
    return tier.start_load(keys, buffers(len(keys))) if kind == "load" else tier.start_lookup(keys)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("base", [ScriptedTier, BatchTier])
@pytest.mark.parametrize("first", ["load", "lookup"])
@pytest.mark.parametrize("second", ["load", "lookup"])
def test_b7_whoever_comes_behind_a_thousand_blocks_waits_for_a_fifth_of_them(threads, base, first, second):
    script = Script()
    with drive(script, base, info=ASKED, threads=threads, seed={key: row(0) for key in KEYS}) as tier:
        # Every thread is held up, so that both jobs wait when the first call is made.
        script.before = gate = Gate("load", "load_many", keys=KEYS[:threads])
        jobs = []
        for key in KEYS[:threads]:
            jobs.append(start(tier, "load", [key]))
            gate.wait_entered()
        jobs += [start(tier, first, KEYS[64:-1]), start(tier, second, [LAST])]
        gate.open()
        for job in jobs:
            assert tier.wait(job).error is None
    calls = [keys for method, keys in script.calls if method in {"load", "load_many", "contains"}]
    own = next(number for number, keys in enumerate(calls) if LAST in keys)
    # Calls of several threads run side by side: what each of them has done by then counts.
    assert sum(len(keys) for keys in calls[threads : own + 1]) <= MANY / 5 / threads + threads * len(
        calls[own]
    )


def test_b7_the_first_call_of_a_long_job_leaves_most_of_it_for_later():
    """Whoever comes when all threads are at a long job waits for the end of their calls."""
    script = Script()
    with drive(script, BatchTier, info=ASKED, threads=4, seed={key: row(0) for key in KEYS}) as tier:
        script.before = gate = Gate("load_many")
        jobs = [tier.start_load(KEYS[64:-1], buffers(MANY))]
        gate.wait_entered(4)
        jobs.append(tier.start_load([LAST], buffers(1)))
        gate.open()
        for job in jobs:
            assert tier.wait(job).error is None
    sizes = [len(keys) for _, keys in script.calls if len(keys) > 0]
    own = next(number for number, (_, keys) in enumerate(script.calls) if LAST in keys)
    assert sum(sizes[:4]) <= MANY / 5
    assert max(sizes) <= MANY / 5 / 4 / 2
    assert own <= 3 + 4 + 4


def test_i18_neighbours_of_a_job_move_together_though_others_wait():
    script = Script()
    keys = similar_keys(641)
    with drive(script, BatchTier, info=ASKED, threads=1, seed={key: row(0) for key in keys}) as tier:
        script.before = gate = Gate("load_many", keys=keys[:1])
        jobs = [tier.start_load(keys[:1], buffers(1))]
        gate.wait_entered()
        jobs += [tier.start_load(keys[begin : begin + 64], buffers(64)) for begin in range(1, 641, 64)]
        gate.open()
        for job in jobs:
            assert tier.wait(job).error is None
    number = {key: index for index, key in enumerate(keys)}
    calls = [asked for method, asked in script.calls if method == "load_many"]
    pairs = [pair for asked in calls for pair in itertools.pairwise(asked)]
    neighbours = [pair for pair in pairs if number[pair[1]] == number[pair[0]] + 1]
    assert len(neighbours) > 0.8 * len(pairs)


def test_b7_short_jobs_still_share_a_call():
    script = Script()
    with drive(script, BatchTier, info=ASKED, threads=1, seed={key: row(0) for key in KEYS}) as tier:
        script.before = gate = Gate("load_many", keys=KEYS[:1])
        jobs = [tier.start_load(KEYS[:1], buffers(1))]
        gate.wait_entered()
        jobs += [tier.start_load([key], buffers(1)) for key in KEYS[1:9]]
        gate.open()
        for job in jobs:
            assert tier.wait(job).error is None
    assert [len(keys) for method, keys in script.calls if method == "load_many"] == [1, 8]


def test_b7_a_call_wakes_one_thread(monkeypatch):
    """A thread that is woken and finds nothing to do keeps those waiting that have something to do."""
    in_vain = []
    take = WorkQueue.take

    def noting(queue: WorkQueue, limits, now: float, *, stores: bool = True):
        taken = take(queue, limits, now, stores=stores)
        if not taken:
            in_vain.append(now)
        return taken

    monkeypatch.setattr(WorkQueue, "take", noting)
    script = Script()
    with drive(script, BatchTier, info=ASKED, threads=4, seed={key: row(0) for key in KEYS}) as tier:
        for begin in range(0, 80, 4):
            assert tier.wait(tier.start_lookup(KEYS[begin : begin + 4])).error is None
    assert len(in_vain) <= 4 + 20  # when it starts, and behind each call
