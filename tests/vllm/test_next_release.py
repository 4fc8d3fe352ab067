"""The comparison with a release that can't be installed sees what differs, and nothing in the one that is here."""

import importlib.util
from pathlib import Path

import pytest

from kvtier_vllm import compat
from tests.vllm.engines import needs_vllm
from tests.vllm.next_release import _SUBCLASSES, Sources, differences, unknown_members


@needs_vllm
def test_c51_the_release_that_is_here_shows_no_difference():
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    sources = Sources(Path(found.origin).parent.parent)
    assert list(differences(sources, compat.SUPPORTED[-1])) == []
    assert list(unknown_members(sources)) == []


BASE = """
from typing import TYPE_CHECKING
from vllm.other import Parent

class OffloadingWorker(Parent):
    def submit_store(self, job_id, src_spec): ...

class LookupResult:
    HIT = 1
    MISS = 2

if TYPE_CHECKING:
    class LoadStoreSpec: ...
"""
OTHER = """
class Parent:
    def wait(self, job_ids): ...
"""


@pytest.fixture
def said(tmp_path):
    for module, text in {"v1/kv_offload/base": BASE, "other": OTHER}.items():
        file = tmp_path / "vllm" / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return list(differences(Sources(tmp_path), "0.33"))


def test_c51_what_a_release_has_otherwise_is_said_by_name(said):
    assert (
        "vllm.v1.kv_offload.base:OffloadingWorker.submit_store takes (self, job_id, src_spec)"
        " and not (self, job_id, src_spec, dst_spec)" in said
    )
    assert "vllm.v1.kv_offload.base:OffloadingWorker.submit_load is missing" in said
    assert "vllm.v1.kv_offload.base:LookupResult has no HIT_PENDING, RETRY" in said


@pytest.mark.parametrize("name", ["OffloadingWorker.wait", "LoadStoreSpec"])
def test_c51_what_is_inherited_or_under_a_condition_is_found(said, name):
    assert not any(f":{name} " in text for text in said)


def test_i17_what_a_base_class_has_got_since_is_said(tmp_path):
    for base in _SUBCLASSES:
        module, _, name = base.partition(":")
        file = tmp_path / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as text:
            text.write(f"class {name}:\n    def shutdown(self): ...\n    def touch(self): ...\n")
    manager = tmp_path / "vllm/v1/kv_offload/base.py"
    manager.write_text(
        manager.read_text().replace(
            "class OffloadingManager:",
            "class OffloadingManager:\n    @abstractmethod\n    def promise(self): ...\n"
            "    def on_moon(self): local = 1\n    colour = 'red'",
        )
    )
    manager_says = [text for text in unknown_members(Sources(tmp_path)) if ":OffloadingManager." in text]
    assert [text.partition(":OffloadingManager.")[2].partition(" is ")[::2] for text in manager_says] == [
        ("promise", "abstract, and kvtier_vllm.manager:KvtierManager does not define it"),
        (
            "on_moon",
            "new: define it in kvtier_vllm.manager:KvtierManager, or say why its default is right",
        ),
        ("colour", "new: define it in kvtier_vllm.manager:KvtierManager, or say why its default is right"),
    ]
