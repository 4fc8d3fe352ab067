"""Blocks of LoRA adapters in vLLM's manager: the real manager, coordinator, pool and files, and no engine (C02)."""

import sys
import threading
from types import SimpleNamespace

import pytest

from kvtier_vllm import adapter_files, adapter_waits
from kvtier_weights import look_at_file
from tests.vllm.engines import needs_vllm
from tests.vllm.models import save_adapter, until_settled
from tests.vllm.test_manager_order import Scheduler

pytestmark = [
    needs_vllm,
    # The first import of vLLM's manager compiles with torch, which warns of itself.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


class WithAdapter(Scheduler):
    """Begins all requests with the adapter at *path*."""

    def __init__(self, path):
        super().__init__(20, 1, "lru", has_lora=True)
        self.adapter = SimpleNamespace(
            lora_name="mine", lora_path=str(path), lora_int_id=1, is_3d_lora_weight=False
        )

    def named(self):
        request_id = super().named()
        self.manager._holder.arrive(
            SimpleNamespace(request_id=request_id, lora_request=self.adapter, block_hashes=())
        )
        return request_id

    def end_step(self):
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def hits(self, context, keys):
        """As vLLM asks, step by step, while it is told to ask again."""
        from vllm.v1.kv_offload.base import LookupResult

        while self.manager.lookup(keys[0][0], context) is LookupResult.RETRY:
            self.end_step()
        return super().hits(context, keys)

    def write(self, keys, piece):
        super().write(keys, piece)
        while self.manager.has_pending_work():
            self.end_step()


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(adapter_waits, "PATIENCE_S", 60.0)
    path = save_adapter(tmp_path / "mine", seed=1)
    until_settled(path)
    scheduler = WithAdapter(path)
    yield scheduler
    scheduler.manager.shutdown()


def test_r8_c02_a_request_whose_adapter_changes_in_the_queue_loads_nothing(vllm, tmp_path):
    keys = vllm.keys("first", 5)
    assert vllm.read(keys) == 0
    vllm.write(keys, 5)
    assert vllm.read(keys) == 5
    waiting = vllm.begin(keys)
    save_adapter(tmp_path / "mine", seed=2)  # vLLM reads it once the request leaves the queue
    assert vllm.hits(waiting, keys) == 0


def test_r8_c02_what_an_adapter_made_while_its_files_changed_is_not_stored(vllm, tmp_path):
    keys = vllm.keys("first", 5)
    assert vllm.read(keys) == 0
    context = vllm.begin(keys)
    save_adapter(tmp_path / "mine", seed=2)
    vllm.store(context, keys, 5)
    while vllm.manager.has_pending_work():
        vllm.end_step()
    assert len(vllm.manager._tiers.coordinator.state.ledger.blocks) == 0


def test_c31_the_schedulers_thread_opens_no_file_of_an_adapter(vllm, tmp_path):
    opened = []

    def note(event, arguments):
        if event == "open" and str(arguments[0]).startswith(str(tmp_path / "mine")):
            opened.append(threading.current_thread().name)

    sys.addaudithook(note)
    keys = vllm.keys("first", 5)
    assert vllm.read(keys) == 0
    vllm.write(keys, 5)
    assert vllm.read(keys) == 5
    assert opened
    assert threading.current_thread().name not in opened


@pytest.fixture
def gate(monkeypatch):
    """Shut, it holds looks up, as storage that hangs does."""
    open_gate = threading.Event()
    open_gate.set()

    def look_through(path):
        assert open_gate.wait(60)
        return look_at_file(path)

    monkeypatch.setattr(adapter_files, "look_at_file", look_through)
    yield open_gate
    open_gate.set()


def test_c31_storage_that_hangs_costs_hits_and_no_request_until_it_answers_again(
    vllm, gate, monkeypatch, caplog
):
    keys, more = vllm.keys("first", 5), vllm.keys("more", 5)
    assert vllm.read(keys) == 0
    vllm.write(keys, 5)
    gate.clear()
    monkeypatch.setattr(adapter_waits, "PATIENCE_S", 0.0)
    assert vllm.read(keys) == 0
    vllm.write(more, 5)
    gate.set()
    monkeypatch.setattr(adapter_waits, "PATIENCE_S", 60.0)
    assert vllm.read(keys) == 5
    assert vllm.read(more) == 0, "nothing proves whose they are"
    [record] = caplog.records
    assert "the adapter 'mine' from" in record.message
    assert "a look at its files takes more than" in record.message


def test_c34_a_reset_lets_go_of_stores_that_wait_for_a_look(vllm, gate):
    keys = vllm.keys("first", 5)
    assert vllm.read(keys) == 0
    context = vllm.begin(keys)
    gate.clear()
    vllm.store(context, keys, 5)
    assert vllm.manager.has_pending_work()
    vllm.manager.reset_cache()
    assert not vllm.manager.has_pending_work()
    ledger = vllm.manager._tiers.coordinator.state.ledger
    assert len(ledger.leases) == len(ledger.blocks) == 0
