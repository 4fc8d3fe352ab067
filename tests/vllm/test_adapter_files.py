"""An adapter is known by what its files hold, while these stay as they were (C02)."""

import os
import shutil
import threading
from types import SimpleNamespace

import pytest

from kvtier_core.engine import make_offload_key
from kvtier_vllm import adapters as module
from kvtier_vllm.adapters import Adapters, KeyNames, vllms_own
from kvtier_weights import digest_weights


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "is_settled", lambda look: True)  # but where a test is about that
    monkeypatch.setattr(module, "_MOMENT_S", 60.0)
    known = Adapters()
    yield known
    known.close()


def save(directory, weights=b"one"):
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_bytes(b"{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def asked(path, number=1, name="mine", *, is_3d=False):
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=number, is_3d_lora_weight=is_3d)


def test_v8_c02_the_same_content_has_one_identity_and_another_has_another(adapters, tmp_path):
    one = adapters.meet(asked(save(tmp_path / "a"), 1)).identity
    assert one is not None
    assert len(one) == 12
    assert adapters.meet(asked(save(tmp_path / "b"), 2)).identity == one
    assert adapters.meet(asked(save(tmp_path / "c", b"two"), 3)).identity != one
    assert adapters.meet(asked(save(tmp_path / "d"), 4, is_3d=True)).identity != one
    again = Adapters()
    assert again.meet(asked(tmp_path / "a", 7)).identity == one, "in another run"
    again.close()


def test_v8_what_vllm_does_not_read_does_not_count(adapters, tmp_path):
    adapter = adapters.meet(asked(save(tmp_path / "a")))
    (tmp_path / "a" / "README.md").write_text("new")
    (tmp_path / "a" / "checkpoint-500").mkdir()
    (tmp_path / "a" / "adapter_of_another_kind").mkdir()
    assert adapter.is_unchanged()


def overwrite(path):
    (path / "adapter_model.safetensors").write_bytes(b"two")


def replace_by_one_with_its_times(path):
    old, new = path / "adapter_model.safetensors", path / "new"
    new.write_bytes(b"two")
    os.utime(new, ns=(old.stat().st_atime_ns, old.stat().st_mtime_ns))
    new.replace(old)


def add_a_form(path):
    (path / "adapter_model.bin").write_bytes(b"two")


def configure(path):
    (path / "adapter_config.json").write_bytes(b"[]")


def remove(path):
    shutil.rmtree(path)


def exchange_the_directory(path):
    path.rename(path.with_name("old"))
    save(path)


@pytest.mark.parametrize(
    "change",
    [overwrite, replace_by_one_with_its_times, add_a_form, configure, remove, exchange_the_directory],
)
def test_r8_c02_an_adapter_whose_files_change_is_distrusted_for_good(adapters, tmp_path, change, caplog):
    path = save(tmp_path / "a")
    adapter = adapters.meet(asked(path))
    assert adapter.is_unchanged()
    assert adapter.identity is not None
    change(path)
    assert not adapter.is_unchanged()
    assert adapter.identity is None
    save(path)
    for number in (1, 2):  # vLLM's own cache may have blocks of both under this name and path
        assert adapters.meet(asked(path, number)).identity is None
    [record] = caplog.records
    assert "the adapter 'mine' from" in record.message
    assert str(path) in record.message


def test_r8_c02_a_link_that_turns_is_a_change(adapters, tmp_path):
    for name, weights in (("1", b"one"), ("2", b"two")):
        save(tmp_path / name, weights)
    (tmp_path / "a").symlink_to(tmp_path / "1")
    adapter = adapters.meet(asked(tmp_path / "a"))
    assert adapter.identity is not None
    (tmp_path / "a").unlink()
    (tmp_path / "a").symlink_to(tmp_path / "2")
    assert adapters.meet(asked(tmp_path / "a")).identity is None


def test_r8_c02_a_number_stands_for_one_adapter(adapters, tmp_path, caplog):
    """vLLM's workers go by the number alone, and serve the first one's weights for both."""
    one = adapters.meet(asked(save(tmp_path / "a"), 1, "a"))
    two = adapters.meet(asked(save(tmp_path / "b", b"two"), 1, "b"))
    assert one.identity is two.identity is None
    assert "its number, 1, stands for another one as well" in caplog.text
    assert adapters.meet(asked(save(tmp_path / "c"), 2, "c")).identity is not None


def test_r8_c02_a_layout_of_the_weights_belongs_to_a_name_and_a_path(adapters, tmp_path):
    save(tmp_path / "a")
    assert adapters.meet(asked(tmp_path / "a")).identity is not None
    assert adapters.meet(asked(tmp_path / "a", 2, is_3d=True)).identity is None


def test_r8_files_that_may_change_without_another_time_are_not_read_yet(adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "is_settled", lambda look: False)
    assert adapters.meet(asked(save(tmp_path / "a"))).identity is None
    monkeypatch.setattr(module, "is_settled", lambda look: True)
    assert adapters.meet(asked(tmp_path / "a")).identity is not None


@pytest.mark.parametrize("path", ["somebody/on-the-hub", "/nowhere/at/all"])
def test_v8_an_adapter_whose_files_are_not_here_is_told_once_by_name(adapters, path, caplog):
    for _ in range(2):
        assert adapters.meet(asked(path)).identity is None
    [record] = caplog.records
    assert f"the adapter 'mine' from '{path}': kvtier sees no files of it there" in record.message
    assert "Give vLLM the path of a local directory" in record.message


def test_v8_files_that_cannot_be_read_are_told(adapters, tmp_path, monkeypatch, caplog):
    def fail(files):
        raise PermissionError("not yours")

    monkeypatch.setattr(module, "digest_weights", fail)
    assert adapters.meet(asked(save(tmp_path / "a"))).identity is None
    assert "its files can't be read (not yours)" in caplog.text


def test_v8_times_of_an_image_say_nothing(adapters, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "look_at_file", lambda path: None)
    assert adapters.meet(asked(save(tmp_path / "a"))).identity is None
    assert "read-only image" in caplog.text


def test_v8_a_large_adapter_is_not_waited_for(adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MOMENT_S", 0.0)
    may_read, has_read = threading.Event(), threading.Event()

    def read(files):
        assert may_read.wait(60)
        try:
            return digest_weights(files)
        finally:
            has_read.set()

    monkeypatch.setattr(module, "digest_weights", read)
    adapter = adapters.meet(asked(save(tmp_path / "a")))
    assert adapter.identity is None
    may_read.set()
    assert has_read.wait(60)
    monkeypatch.setattr(module, "_MOMENT_S", 60.0)
    adapters.meet(asked(save(tmp_path / "b"), 2, "b"))  # the same thread reads it after that
    assert adapter.identity is not None


def test_r8_c02_a_doubt_holds_for_all_and_for_those_to_come(adapters, tmp_path, caplog):
    before = adapters.meet(asked(save(tmp_path / "a")))
    adapters.distrust_all("something was loaded")
    assert before.identity is None
    assert adapters.meet(asked(save(tmp_path / "b"), 2, "b")).identity is None
    assert caplog.text.count("something was loaded") == 2


def test_v8_there_is_an_end_to_what_is_remembered(adapters, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_MAX_ADAPTERS", 1)
    assert adapters.meet(asked(save(tmp_path / "a"))).identity is not None
    for number in (2, 3):
        assert adapters.meet(asked(save(tmp_path / "b"), number, "b")).identity is None
    assert adapters.meet(asked(tmp_path / "a")).identity is not None
    [record] = caplog.records
    assert "1 came before it" in record.message


def test_v8_keys_carry_the_identity_before_the_group_and_give_vllms_back(adapters, tmp_path):
    key = make_offload_key(b"h" * 32, 3)
    names = KeyNames(has_lora=True)
    none_of_them, one = names.of(None), names.of(adapters.meet(asked(save(tmp_path / "a"))))
    assert none_of_them is not None
    assert one is not None
    own, mine = none_of_them(key), one(key)
    assert len({key, own, mine}) == 3
    assert len(mine) == len(own) == 48
    assert mine[-4:] == own[-4:] == key[-4:]
    assert names.vllms(mine) == names.vllms(own) == key
    assert names.of(adapters.stranger) is None


def test_v8_without_lora_keys_are_vllms_own():
    names = KeyNames(has_lora=False)
    key = make_offload_key(b"h" * 32, 3)
    assert names.of(None) is vllms_own
    assert names.vllms(key) is key
