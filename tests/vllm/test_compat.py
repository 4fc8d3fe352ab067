import sys
from types import SimpleNamespace

import pytest

from kvtier_core import PluginError
from kvtier_vllm import compat
from tests.vllm.engines import needs_vllm


def test_without_vllm_the_plugin_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(PluginError, match=r"vllm>=0\.32,<0\.33"):
        compat.check_vllm()


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0+cpu", "1.0"])
def test_c51_another_release_is_refused_by_name(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with pytest.raises(PluginError, match=r"supports vLLM 0\.32") as raised:
        compat.check_vllm()
    assert version in str(raised.value)


def test_k10_o3_a_release_that_only_looks_alike_is_refused_with_what_differs(monkeypatch):
    class OffloadingManager:
        def lookup(self, keys):
            pass

    base = SimpleNamespace(OffloadingManager=OffloadingManager)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.9"))
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.base", base)
    with pytest.raises(PluginError) as raised:
        compat.check_vllm()
    message = str(raised.value)
    assert "OffloadingManager.lookup takes (self, keys) and not (self, key, req_context)" in message
    assert "OffloadingWorker.wait is missing" in message


@needs_vllm
@pytest.mark.filterwarnings("ignore")
def test_the_release_that_is_here_is_accepted():
    compat.check_vllm()
