import ast
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
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


def test_c51_an_object_that_lost_what_is_read_from_it_is_told_by_name(monkeypatch):
    @dataclass
    class JobResult:
        job_id: int
        success: bool

    @dataclass
    class CanonicalKVCaches:
        blocks: list[int]

    class Medium(Enum):
        CPU = "CPU"

    @dataclass
    class ModelConfig:
        model: str
        hf_config: object = field(default_factory=object)

    modules = {
        "vllm": SimpleNamespace(__version__="0.32.9"),
        "vllm.v1.kv_offload.base": SimpleNamespace(CanonicalKVCaches=CanonicalKVCaches, Medium=Medium),
        "vllm.v1.kv_offload.tiering.base": SimpleNamespace(JobResult=JobResult),
        "vllm.config": SimpleNamespace(ModelConfig=ModelConfig),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(PluginError) as raised:
        compat.check_vllm()
    message = str(raised.value)
    assert "SecondaryTierManager.submit_store is missing" in message
    assert "JobResult has no successful_keys" in message
    assert "CanonicalKVCaches has no tensors, group_data_refs" in message
    assert "Medium has no STORAGE" in message
    assert "ModelConfig has no model_weights, revision" in message


def test_c51_every_class_of_vllm_that_is_imported_is_checked_by_name():
    sources = Path(compat.__file__).parent.glob("*.py")
    imported = {
        f"{node.module}:{alias.name}"
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
    }
    covered = set()
    for name in (*compat._SIGNATURES, *compat._NAMES):
        module, _, path = name.partition(":")
        covered.add(f"{module}:{path.partition('.')[0]}")
    assert imported - covered == set()


@needs_vllm
@pytest.mark.filterwarnings("ignore")
def test_the_release_that_is_here_is_accepted():
    compat.check_vllm()
