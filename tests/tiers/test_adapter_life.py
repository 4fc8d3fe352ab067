"""Opening, resetting and shutting down a blocking tier."""

import gc
import logging
import mmap
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import pytest

from kvtier_core.coordinator.jobs import JobKind
from kvtier_core.errors import TierOpenError
from kvtier_core.keys import OffloadKey
from kvtier_core.manager.blocking import BlockingTier
from kvtier_core.manager.events import Serving
from kvtier_core.manager.guard import Guard, TierIdentity
from kvtier_core.manager.port import TierHome
from kvtier_core.transfer.pool import Pool, PoolGeometry
from kvtier_core.values import JobResult, RequestInfo, TierContext, TierInfo, TierJob
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.rows import similar_keys
from kvtier_testing.tiers import assert_contents
from tests.tiers.engine import TierEngine
from tests.tiers.held import num_held
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
        assert num_held(tier) == 1
    assert sorted(script.closed) == [0, 1]
    assert not script.violations


def test_c34_the_presence_set_of_the_old_namespace_is_replaced():
    with drive(Script()) as tier:
        tier.store(rows(A))
        before = tier.resident()
        tier.reset("second")
        after = tier.resident()
        assert after is not None
        assert before is not after
        assert after.contains_many([A]) == [False]


def test_c34_a_load_in_flight_at_a_reset_has_its_result_once():
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A))
        script.before = gate = Gate("load")
        buffer = bytearray(ROW)
        load = tier.start_load([A], [buffer])
        gate.wait_entered()
        tier.reset("second")
        assert tier.drain(0) == [load]
        gate.open()
        assert tier.wait(load).error is None
        assert buffer == rows(A)[A]
        assert tier.drain(PATIENCE_S) == []


def test_c34_a_reset_that_cannot_open_leaves_nothing_served_and_can_be_tried_again():
    script = Script()
    with drive(script) as tier:
        tier.store(rows(A))
        script.before = lambda method, keys: fail(OSError("gone")) if method == "open" else None
        with pytest.raises(TierOpenError, match="OSError: gone"):
            tier.reset("second")
        assert tier.resident() is None
        result = tier.load([A]).result
        assert result.failed == (A,)
        assert result.error is not None
        assert "could not be opened" in result.error
        assert tier.take_events() == []
        script.before = lambda method, keys: None
        tier.reset("third")
        assert_contents(tier, {}, absent=[A])
        tier.store(rows(B))
        assert_contents(tier, rows(B), absent=[A])


def test_c34_instances_that_hang_are_limited(monkeypatch):
    monkeypatch.setattr("kvtier_core.manager.blocking.tier._MAX_RETIRED", 2)
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
    assert tier.drain(PATIENCE_S) == []
    tier.shutdown()
    assert sorted(script.closed) == [0, 1, 2]


def make_port(script: Script, events: SimpleQueue[Any]) -> BlockingTier:
    tier_class = type("Scripted", (ScriptedTier,), {"script": script, "seed": {}})
    settings = ScriptedTier.Settings(type="scripted")
    identity = TierIdentity(name="scripted", type="scripted", distribution="test", version="1")
    home = TierHome(
        guard=Guard(identity, (), logging.getLogger("kvtier")),
        info=ScriptedTier.info,
        limits=settings.limits,
        context=TierContext(name="scripted", namespace="first", row_bytes=ROW),
        row=Pool.create(PoolGeometry(num_rows=4, row_bytes=ROW)).row,
        clock=time.monotonic,
        emit=events.put,
        finish=events.put,
    )
    return BlockingTier(tier_class, settings, home)


def job_of(number: int, *keys: OffloadKey) -> TierJob:
    rows = tuple(range(len(keys)))
    return TierJob(id=number, request=RequestInfo(request_id="r"), keys=keys, rows=rows)


def test_c34_before_it_is_open_nothing_is_held_and_every_job_fails():
    script = Script()
    events: SimpleQueue[Any] = SimpleQueue()
    port = make_port(script, events)
    assert script.calls == []
    assert port.resident() is None
    port.discard([A])
    port.touch([A], 0)
    port.cancel([1])
    port.tick()
    assert port.take_events() == []
    for kind in (JobKind.LOOKUP, JobKind.TIER_LOAD, JobKind.TIER_STORE):
        port.submit(kind, job_of(1, A))
        result = events.get(timeout=PATIENCE_S)
        assert result.failed == (A,)
        assert "not open" in result.error
    assert port.wait_down(0.0), "it was never started"


def test_c34_a_reset_while_it_opens_holds_once_it_is_open():
    script = Script()
    events: SimpleQueue[Any] = SimpleQueue()
    port = make_port(script, events)
    script.before = gate = Gate("open")
    port.start(None)
    gate.wait_entered()
    port.reset("second", {"epoch": 2}, 1)
    gate.open()
    assert [events.get(timeout=PATIENCE_S).generation for _ in range(2)] == [0, 1]
    assert [context.namespace for context in script.contexts] == ["first", "second"]
    port.shutdown(PATIENCE_S)
    assert port.wait_down(PATIENCE_S)


def test_c34_after_shutdown_nothing_opens_again():
    script = Script()
    events: SimpleQueue[Any] = SimpleQueue()
    port = make_port(script, events)
    port.start(None)
    for _ in range(2):
        port.shutdown(PATIENCE_S)
        assert port.wait_down(PATIENCE_S)
    port.reset("second", {}, 1)
    port.submit(JobKind.TIER_STORE, job_of(1, A))
    assert [type(events.get(timeout=PATIENCE_S)) for _ in range(2)] == [Serving, JobResult]
    assert events.empty()
    assert len(script.contexts) == 1
    assert script.closed == [0]


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


def test_c30_every_job_ends_by_itself_also_one_of_no_key():
    events: SimpleQueue[Any] = SimpleQueue()
    port = make_port(Script(), events)
    port.start(None)
    assert isinstance(events.get(timeout=PATIENCE_S), Serving)
    port.submit(JobKind.TIER_STORE, job_of(1, A))
    port.submit(JobKind.TIER_STORE, job_of(2))
    assert {events.get(timeout=PATIENCE_S).job_id for _ in range(2)} == {1, 2}
    port.shutdown(PATIENCE_S)
    assert port.wait_down(PATIENCE_S)
    assert events.empty()


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
    monkeypatch.setattr("kvtier_core.manager.port._RESET_RETRY_S", 0.05)
    monkeypatch.setattr("kvtier_core.manager.blocking.tier._MAX_RETIRED", 1)
    script = Script()
    tier_class = type("Scripted", (ScriptedTier,), {"script": script, "seed": {}})
    with TierEngine(tier_class, threads=1) as engine, Gate("store") as gate:
        script.before = gate
        for number in range(2):
            engine.wait_until(lambda: engine.manager.figures()["tiers"]["far"]["serving"])
            engine.start_store(f"r{number}", [A, B])
            engine.manager.end_step()
            gate.wait_entered()
            engine.manager.reset_cache()
        engine.wait_until(lambda: "at most 1 may; see why" in caplog.text)
        assert not engine.manager.figures()["tiers"]["far"]["serving"]
        gate.open()
        engine.wait_until(lambda: engine.manager.figures()["tiers"]["far"]["serving"])
    assert "job failed" not in caplog.text, "what a reset ended has not failed"
