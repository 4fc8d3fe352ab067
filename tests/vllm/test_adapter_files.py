"""An adapter is known by what its files hold, while these stay as they were (C02)."""

import os
import shutil
import threading
from concurrent.futures import wait
from types import SimpleNamespace

import pytest

from kvtier_core.engine import make_offload_key
from kvtier_vllm import adapter_files, adapter_waits
from kvtier_vllm import adapters as module
from kvtier_vllm.adapter_waits import AdapterWait
from kvtier_vllm.adapters import Adapters, KeyNames, vllms_own
from kvtier_weights import digest_weights, look_at_file


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "is_settled", lambda look: True)  # but where a test is about that
    for place in (module, adapter_waits):
        monkeypatch.setattr(place, "PATIENCE_S", 60.0)
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


def seen(adapter):
    """The adapter, once its files have been looked at and read."""
    number = adapter.look()
    while not adapter.has_looked(number) or adapter.is_being_digested:
        wait([*adapter._under_way, *filter(None, [adapter._digest])])
    return adapter


def met(adapters, *arguments, **named):
    return seen(adapters.meet(asked(*arguments, **named)))


def test_v8_c02_the_same_content_has_one_identity_and_another_has_another(adapters, tmp_path):
    one = met(adapters, save(tmp_path / "a"), 1).identity
    assert one is not None
    assert len(one) == 12
    assert met(adapters, save(tmp_path / "b"), 2).identity == one
    assert met(adapters, save(tmp_path / "c", b"two"), 3).identity != one
    assert met(adapters, save(tmp_path / "d"), 4, is_3d=True).identity != one
    again = Adapters()
    assert met(again, tmp_path / "a", 7).identity == one, "in another run"
    again.close()


def test_v8_what_vllm_does_not_read_does_not_count(adapters, tmp_path):
    adapter = met(adapters, save(tmp_path / "a"))
    (tmp_path / "a" / "README.md").write_text("new")
    (tmp_path / "a" / "checkpoint-500").mkdir()
    (tmp_path / "a" / "adapter_of_another_kind").mkdir()
    assert seen(adapter).is_trusted


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
    adapter = met(adapters, path)
    assert seen(adapter).is_trusted
    assert adapter.identity is not None
    change(path)
    assert not seen(adapter).is_trusted
    assert adapter.identity is None
    save(path)
    for number in (1, 2):  # vLLM's own cache may have blocks of both under this name and path
        assert met(adapters, path, number).identity is None
    [record] = caplog.records
    assert "the adapter 'mine' from" in record.message
    assert str(path) in record.message


def test_r8_c02_a_link_that_turns_is_a_change(adapters, tmp_path):
    for name, weights in (("1", b"one"), ("2", b"two")):
        save(tmp_path / name, weights)
    (tmp_path / "a").symlink_to(tmp_path / "1")
    adapter = met(adapters, tmp_path / "a")
    assert adapter.identity is not None
    (tmp_path / "a").unlink()
    (tmp_path / "a").symlink_to(tmp_path / "2")
    assert met(adapters, tmp_path / "a").identity is None


def test_r8_c02_a_number_stands_for_one_adapter(adapters, tmp_path, caplog):
    """vLLM's workers go by the number alone, and serve the first one's weights for both."""
    one = met(adapters, save(tmp_path / "a"), 1, "a")
    two = met(adapters, save(tmp_path / "b", b"two"), 1, "b")
    assert one.identity is two.identity is None
    assert "its number, 1, stands for another one as well" in caplog.text
    assert met(adapters, save(tmp_path / "c"), 2, "c").identity is not None


def test_r8_c02_a_layout_of_the_weights_belongs_to_a_name_and_a_path(adapters, tmp_path):
    save(tmp_path / "a")
    assert met(adapters, tmp_path / "a").identity is not None
    assert met(adapters, tmp_path / "a", 2, is_3d=True).identity is None


def test_r8_files_that_may_change_without_another_time_are_not_read_yet(adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "is_settled", lambda look: False)
    assert met(adapters, save(tmp_path / "a")).identity is None
    monkeypatch.setattr(module, "is_settled", lambda look: True)
    assert met(adapters, tmp_path / "a").identity is not None


@pytest.mark.parametrize("path", ["somebody/on-the-hub", "/nowhere/at/all", "~nobody-by-this-name/x", "a\0b"])
def test_v8_an_adapter_whose_files_are_not_here_is_told_once_by_name(adapters, path, caplog):
    for _ in range(2):
        assert met(adapters, path).identity is None
    [record] = caplog.records
    assert f"the adapter 'mine' from {path!r}: kvtier sees no files of it there" in record.message
    assert "Give vLLM the path of a local directory" in record.message


def test_v8_files_that_cannot_be_read_are_told(adapters, tmp_path, monkeypatch, caplog):
    def fail(files):
        raise PermissionError("not yours")

    monkeypatch.setattr(adapter_files, "digest_weights", fail)
    assert met(adapters, save(tmp_path / "a")).identity is None
    assert "its files can't be read (not yours)" in caplog.text


def test_v8_times_of_an_image_say_nothing(adapters, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(adapter_files, "look_at_file", lambda path: None)
    assert met(adapters, save(tmp_path / "a")).identity is None
    assert "read-only image" in caplog.text


class Gate:
    """Holds a function up while it is shut."""

    def __init__(self, function):
        self.opened = threading.Event()
        self._function = function
        self.calls = 0

    def __call__(self, *arguments):
        self.calls += 1
        assert self.opened.wait(60)
        return self._function(*arguments)


@pytest.fixture
def shut(monkeypatch):
    """Puts a gate before a function of the adapters' files: ``shut(digest_weights)``."""
    gates = []

    def put(function):
        gates.append(Gate(function))
        monkeypatch.setattr(adapter_files, function.__name__, gates[-1])
        return gates[-1]

    yield put
    for gate in gates:
        gate.opened.set()


def test_v8_a_large_adapter_is_waited_for_a_while_and_looks_go_on(adapters, tmp_path, shut, monkeypatch):
    reading = shut(digest_weights)
    adapter = adapters.meet(asked(save(tmp_path / "a")))
    request = AdapterWait(adapter)
    while not adapter.is_being_digested:
        request.ask()
        assert request.must_wait
        assert not request.is_known
        request.end_step()
    number = adapter.look()
    while not adapter.has_looked(number):
        wait(adapter._under_way)
    monkeypatch.setattr(adapter_waits, "PATIENCE_S", 0.0)
    late = AdapterWait(adapter)
    late.ask()
    assert not late.is_known
    assert not late.must_wait
    reading.opened.set()
    assert seen(adapter).identity is not None
    request.ask()
    assert request.is_known


def test_r8_c02_an_answer_rests_on_a_look_that_began_after_the_question(adapters, tmp_path):
    path = save(tmp_path / "a")
    adapter = met(adapters, path)
    request = AdapterWait(adapter)
    overwrite(path)
    request.ask()
    assert not request.is_known
    assert request.must_wait
    seen(adapter)
    request.ask()
    assert not request.is_known
    assert not request.must_wait


def test_r8_c02_a_request_that_has_run_needs_another_look(adapters, tmp_path):
    path = save(tmp_path / "a")
    request = AdapterWait(met(adapters, path))
    request.ask()
    seen(request.adapter)
    request.ask()
    assert request.is_known
    request.run()
    overwrite(path)
    request.ask()
    assert not request.is_known


def test_c31_looks_that_nobody_has_begun_are_one(adapters, tmp_path, shut):
    looking = shut(look_at_file)
    adapter = adapters.meet(asked(save(tmp_path / "a")))
    while not looking.calls:
        wait(adapter._under_way, 0.01)
    numbers = [adapter.look() for _ in range(5)]
    assert numbers == [2] * 5, "the first one runs"
    assert not adapter.has_looked(1)
    looking.opened.set()
    seen(adapter)
    assert adapter.has_looked(2)


def test_c02_an_adapter_that_vllm_reads_before_the_first_look_is_not_trusted(
    adapters, tmp_path, shut, monkeypatch, caplog
):
    looking = shut(look_at_file)
    adapter = adapters.meet(asked(save(tmp_path / "a")))
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    adapter.may_be_read()
    looking.opened.set()
    assert seen(adapter).identity is None
    [record] = caplog.records
    assert "vLLM reads them before kvtier could look at them" in record.message


def test_c02_vllm_reads_an_adapter_after_the_first_look(adapters, tmp_path, shut, caplog):
    looking = shut(look_at_file)
    adapter = adapters.meet(asked(save(tmp_path / "a")))
    threading.Timer(0.05, looking.opened.set).start()
    adapter.may_be_read()
    assert looking.opened.is_set()
    assert adapter.has_looked(1)
    assert seen(adapter).identity is not None
    assert not caplog.records


def test_c02_files_that_change_while_they_are_read_are_not_trusted(adapters, tmp_path, shut):
    reading = shut(digest_weights)
    path = save(tmp_path / "a")
    adapter = adapters.meet(asked(path))
    while not reading.calls:
        wait(adapter._under_way)
        adapter.take()
    overwrite(path)
    reading.opened.set()
    assert seen(adapter).identity is None


def test_v8_one_that_did_not_come_by_a_request_is_not_looked_for(adapters, caplog, monkeypatch, tmp_path):
    monkeypatch.chdir(save(tmp_path / "a"))
    request = AdapterWait(adapters.stranger)
    request.ask()
    assert not request.is_known
    assert not request.must_wait
    assert "kvtier did not see it come" in caplog.text


def test_r8_c02_a_doubt_holds_for_all_and_for_those_to_come(adapters, tmp_path, caplog):
    before = met(adapters, save(tmp_path / "a"))
    adapters.distrust_all("something was loaded")
    assert before.identity is None
    assert met(adapters, save(tmp_path / "b"), 2, "b").identity is None
    assert caplog.text.count("something was loaded") == 2


def test_v8_there_is_an_end_to_what_is_remembered(adapters, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_MAX_ADAPTERS", 1)
    assert met(adapters, save(tmp_path / "a")).identity is not None
    for number in (2, 3):
        assert met(adapters, save(tmp_path / "b"), number, "b").identity is None
    assert met(adapters, tmp_path / "a").identity is not None
    [record] = caplog.records
    assert "1 came before it" in record.message


def test_v8_keys_carry_the_identity_before_the_group_and_give_vllms_back(adapters, tmp_path):
    key = make_offload_key(b"h" * 32, 3)
    names = KeyNames(has_lora=True)
    none_of_them, one = names.of(None), names.of(met(adapters, save(tmp_path / "a")))
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
