"""Opening, resetting and shutting down a blocking tier."""

import gc
import mmap
import threading
from collections.abc import Sequence

import pytest

from kvtier_core.errors import ClosedError, TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking import BlockTierAdapter
from kvtier_core.values import RequestInfo, TierContext, TierInfo, TierJob
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.rows import similar_keys
from kvtier_testing.tiers import assert_contents
from tests.tiers.engine import TierEngine
from tests.tiers.scripted import ROW, BatchTier, Gate, Script, ScriptedTier, drive, fail, row

KEYS = similar_keys(8)
A, B, C, D = KEYS[:4]


def rows(*keys):
    return {key: row(KEYS.index(key)) for key in keys}


def tier_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvtier-scripted-")}


def test_k7_o4_c34_a_reset_goes_on_with_a_new_instance_for_the_new_namespace():
    script = Script()
    with drive(script, threads=1) as tier:
        tier.store(rows(A))
        script.before = gate = Gate("store")
        running = tier.start_store(rows(B))
        gate.wait_entered()
        queued = tier.start_store(rows(C))
        tier.reset("second")
        failed = tier.wait(queued)
        assert failed.failed == (C,)
        assert failed.error is not None
        assert "reset" in failed.error
        # The old instance's call still runs, the new one works meanwhile.
        assert tier.lookup([A, B, C]) == [False] * 3
        assert tier.unanswered() == {running}
        assert script.closed == []
        gate.open()
        assert tier.store({A: row(7)}).error is None
        assert tier.wait(running).error is None
        assert_contents(tier, {A: row(7)}, absent=[B, C])
        assert [context.namespace for context in script.contexts] == ["kit-namespace", "second"]
        assert script.contexts[1].description == {"model": "kit", "namespace": "second"}
        assert script.stores[0].keys() == {A, B}
        usage = tier.usage()
        assert usage is not None
        assert usage.blocks == 1
    assert sorted(script.closed) == [0, 1]
    assert not script.violations


def test_c34_the_presence_set_of_the_old_namespace_is_replaced():
    with drive(Script()) as tier:
        tier.store(rows(A))
        before = tier.plugin.resident_presence()
        tier.reset("second")
        after = tier.plugin.resident_presence()
        assert before is not after
        assert A not in after


def test_c34_a_load_in_flight_at_a_reset_has_its_result_once():
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A))
        script.before = gate = Gate("load")
        buffer = bytearray(ROW)
        load = tier.start_load([A], [buffer])
        gate.wait_entered()
        tier.reset("second")
        assert tier.hooks.drain_jobs(timeout_s=0) == [load]
        gate.open()
        assert tier.wait(load).error is None
        assert buffer == rows(A)[A]
        assert tier.hooks.drain_jobs(timeout_s=PATIENCE_S) == []


def test_c34_a_reset_that_cannot_open_leaves_nothing_served_and_can_be_tried_again():
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A))
        script.before = lambda method, keys: fail(OSError("gone")) if method == "open" else None
        with pytest.raises(TierOpenError, match="OSError: gone"):
            tier.reset("second")
        assert tier.plugin.resident_presence() is None
        result = tier.load([A]).result
        assert result.failed == (A,)
        assert result.error is not None
        assert "could not be opened" in result.error
        assert tier.take_events() == []
        assert tier.usage() is None
        script.before = lambda method, keys: None
        tier.reset("third")
        assert_contents(tier, {}, absent=[A])
        tier.store(rows(B))
        assert_contents(tier, rows(B), absent=[A])


def test_c34_instances_that_hang_are_limited(monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.adapter._MAX_RETIRED", 2)
    script = Script()
    tier = drive(script, threads=1)
    script.before = gate = Gate("store")
    for index in range(2):
        tier.start_store(rows(A))
        gate.wait_entered()
        tier.reset(f"reset-{index}")
    tier.start_store(rows(A))
    gate.wait_entered()
    with pytest.raises(TierOpenError, match="calls of 3 earlier instances still run and at most 2 may"):
        tier.reset("reset-2")
    gate.open()
    assert tier.hooks.drain_jobs(timeout_s=PATIENCE_S) == []
    tier.shutdown()
    assert sorted(script.closed) == [0, 1, 2]


def test_c34_a_reset_before_the_start_only_changes_the_namespace():
    script = Script()
    tier_class = type("Scripted", (ScriptedTier,), {"script": script, "seed": {}})
    adapter = BlockTierAdapter(
        tier_class,
        ScriptedTier.Settings(type="scripted"),
        TierContext(name="scripted", namespace="first", row_bytes=ROW),
    )
    adapter.reset("second", {"epoch": 2})
    assert script.calls == []
    assert adapter.get_usage() is None
    assert adapter.take_events() == []
    assert adapter.resident_presence() is None
    adapter.discard([A])
    adapter.touch([A])
    adapter.cancel_jobs([1])
    job = TierJob(id=1, request=RequestInfo(request_id="r"), keys=[A])
    assert adapter.lookup(job) is None
    (result,) = adapter.get_finished_jobs()
    assert result.error is not None
    assert "not open" in result.error
    adapter.on_open(pool=None)
    assert [context.namespace for context in script.contexts] == ["second"]
    adapter.shutdown(timeout_s=PATIENCE_S)


def test_c34_after_shutdown_nothing_opens_again():
    script = Script()
    tier = drive(script)
    tier.shutdown()
    with pytest.raises(ClosedError, match="'scripted' was shut down"):
        tier.reset("second")
    with pytest.raises(ClosedError):
        tier.hooks.on_open(pool=None)
    tier.shutdown()
    assert script.closed == [0]


def test_c34_shutdown_before_the_start_is_fine():
    tier_class = type("Scripted", (ScriptedTier,), {"script": Script(), "seed": {}})
    adapter = BlockTierAdapter(
        tier_class,
        ScriptedTier.Settings(type="scripted"),
        TierContext(name="scripted", namespace="first", row_bytes=ROW),
    )
    adapter.shutdown(timeout_s=1.0)
    adapter.shutdown(timeout_s=1.0)
    assert adapter.drain_jobs(timeout_s=0.0) == []


def test_k8_shutdown_ends_the_threads_and_fails_what_is_queued():
    before = tier_threads()
    script = Script()
    tier = drive(script, threads=3)
    mine = tier_threads() - before
    assert len(mine) == 3
    assert all(thread.daemon for thread in mine)
    script.before = gate = Gate("store")
    jobs = [tier.start_store({key: row(1)}) for key in KEYS]
    gate.wait_entered(2)
    waiter = threading.Thread(target=tier.shutdown)
    waiter.start()
    gate.open()
    waiter.join(PATIENCE_S)
    errors = [tier.wait(job).error for job in jobs]
    assert errors.count(None) >= 2
    assert all(error is None or "shut down" in error for error in errors)
    for thread in mine:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert script.closed == [0]
    assert not script.violations


def test_c30_the_core_is_woken_for_every_result():
    woken = threading.Semaphore(0)
    tier_class = type("Scripted", (ScriptedTier,), {"script": Script(), "seed": {}})
    adapter = BlockTierAdapter(
        tier_class,
        ScriptedTier.Settings(type="scripted"),
        TierContext(name="scripted", namespace="first", row_bytes=ROW, wake=woken.release),
    )
    adapter.on_open(pool=None)
    request = RequestInfo(request_id="r")
    adapter.submit_store(TierJob(id=1, request=request, keys=[A], buffers=[memoryview(row(1))]))
    assert woken.acquire(timeout=PATIENCE_S)
    adapter.submit_store(TierJob(id=2, request=request, keys=[]))
    assert woken.acquire(timeout=PATIENCE_S)
    assert {result.job_id for result in adapter.get_finished_jobs()} == {1, 2}
    assert adapter.get_finished_jobs() == []
    adapter.shutdown(timeout_s=PATIENCE_S)


def keep_a_frame(method: str, _keys: Sequence[OffloadKey]) -> None:
    """Leave a circle of an error and the frame it was caught in, as any list of outcomes does."""
    outcomes: list[BaseException] = []
    if method == "contains":
        try:
            fail(FileNotFoundError(method))
        except FileNotFoundError as error:
            outcomes.append(error)


@pytest.mark.parametrize("base", [ScriptedTier, BatchTier])
def test_c34_frames_that_a_tier_leaves_behind_hold_no_rows_after_its_jobs(base):
    script = Script()
    script.before = keep_a_frame
    memory = mmap.mmap(-1, 4 * ROW)
    buffers = [memoryview(memory)[index * ROW : (index + 1) * ROW] for index in range(4)]
    gc.collect()
    gc.disable()  # without it circles stay, as they may for long in an engine
    try:
        with drive(script, base, info=TierInfo(medium="memory", shared=True), threads=1) as tier:
            assert tier.lookup([A, B, C]) == [False] * 3
            assert script.count("contains"), "the tier was not asked"
            assert tier.wait(tier.start_store(dict(zip([A, B], buffers[:2], strict=True)))).error is None
            assert tier.wait(tier.start_load([A, C], buffers[2:])).missing == (C,)
            assert tier.wait(tier.start_store({D: buffers[3]}, deadline=0)).failed == (D,)
        for buffer in buffers:
            buffer.release()
        memory.close()  # raises BufferError while anything else holds a row
    finally:
        gc.enable()


def test_c34_a_tier_out_of_use_because_old_calls_run_comes_back_when_they_have_ended(monkeypatch, caplog):
    monkeypatch.setattr("kvtier_core.manager.opening._RESET_RETRY_S", 0.05)
    monkeypatch.setattr("kvtier_core.manager.blocking.adapter._MAX_RETIRED", 1)
    script = Script()
    tier_class = type("Scripted", (ScriptedTier,), {"script": script, "seed": {}})
    with TierEngine(tier_class, threads=1) as engine, Gate("store") as gate:
        script.before = gate
        for number in range(2):
            engine.wait_until(lambda: engine.manager.describe_tiers()["far"]["serving"])
            engine.start_store(f"r{number}", [A, B])
            engine.manager.end_step()
            gate.wait_entered()
            engine.manager.reset_cache()
        engine.wait_until(lambda: "at most 1 may; see why" in caplog.text)
        assert not engine.manager.describe_tiers()["far"]["serving"]
        gate.open()
        engine.wait_until(lambda: engine.manager.describe_tiers()["far"]["serving"])
    assert "job failed" not in caplog.text, "what a reset ended has not failed"
