"""Blocks of LoRA adapters in vLLM's manager: the real manager, coordinator, pool and files, and no engine (C02)."""

from types import SimpleNamespace

import pytest

from tests.vllm.engines import needs_vllm, save_adapter, until_settled
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
        self.manager._holder.arrive(SimpleNamespace(request_id=request_id, lora_request=self.adapter))
        return request_id


def test_r8_c02_a_request_whose_adapter_changes_in_the_queue_loads_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = save_adapter(tmp_path / "mine", seed=1)
    until_settled(path)
    vllm = WithAdapter(path)
    keys = vllm.keys("first", 5)
    vllm.write(keys, 5)
    assert vllm.read(keys) == 5
    waiting = vllm.begin(keys)
    save_adapter(path, seed=2)  # vLLM reads it once the request leaves the queue
    assert vllm.hits(waiting, keys) == 0
    vllm.manager.shutdown()
