"""Where llama-cpp-python is not installed, the rest of the plugin works, and ``KvtierLlama`` says what to install."""

import importlib
import sys

import pytest


def test_its_module_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delitem(sys.modules, "kvtier_llamacpp.llama_cpp_python", raising=False)
    assert importlib.import_module("kvtier_llamacpp").Engine
    with pytest.raises(ImportError, match=r"needs llama-cpp-python: pip install llama-cpp-python=="):
        importlib.import_module("kvtier_llamacpp.llama_cpp_python")
