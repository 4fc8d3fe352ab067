"""Digests of weights (C02, K1): every byte counts, and is read once."""

import fcntl
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtier_weights import digest_weights, digests, list_model_files, process_began_ns

SIZE = 3 << 20


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """The names of the files that were read as a whole, in a cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_SETTLED_NS", 50_000_000)
    names = []
    read = digests._full

    def note(path):
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(digests, "_full", note)
    return names


def saved(path, content):
    """A file that was last changed a while ago, as the kernel sees it: only waiting does that."""
    path.write_bytes(content)
    while time.time_ns() - path.stat().st_ctime_ns <= digests._SETTLED_NS:
        threading.Event().wait(0.01)
    return path


def test_k1_o2_a_changed_weights_file_changes_the_digest(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one" * 1000)
    before = digest_weights([file])
    assert digest_weights([file]) == before
    file.write_bytes(b"two" * 1000)
    assert digest_weights([file]) != before


@pytest.mark.parametrize("position", [0, (1 << 20) - 1, SIZE // 2, 2 << 20, SIZE - 1])
def test_k1_o2_every_byte_of_weights_counts(tmp_path, position):
    file = tmp_path / "model.bin"
    data = bytearray(SIZE)
    file.write_bytes(data)
    before = digest_weights([file])
    data[position] ^= 1
    file.write_bytes(data)
    assert digest_weights([file]) != before


def test_k1_o2_edges_alone_are_trusting_and_say_so(tmp_path):
    file = tmp_path / "model.bin"
    data = bytearray(SIZE)
    file.write_bytes(data)
    edges = digest_weights([file], edges=True)
    assert edges != digest_weights([file])
    data[SIZE // 2] ^= 1
    file.write_bytes(data)
    assert digest_weights([file], edges=True) == edges
    for position in (0, SIZE - 1):
        data[position] ^= 1
        file.write_bytes(data)
        assert digest_weights([file], edges=True) != edges
        data[position] ^= 1


@pytest.mark.parametrize("edges", [False, True])
def test_k1_o2_size_and_name_of_weights_count_and_their_order_and_place_do_not(tmp_path, edges):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a").write_bytes(b"x")
        (tmp_path / place / "b").write_bytes(b"y")
    here = [tmp_path / "here" / name for name in "ab"]
    there = [tmp_path / "there" / name for name in "ba"]
    expected = digest_weights(there, edges=edges)
    assert digest_weights(here, edges=edges) == expected
    (tmp_path / "here" / "a").write_bytes(b"xx")
    assert digest_weights(here, edges=edges) != expected
    (tmp_path / "here" / "a").write_bytes(b"x")
    renamed = (tmp_path / "here" / "a").rename(tmp_path / "here" / "c")
    assert digest_weights([renamed, here[1]], edges=edges) != expected


def test_c02_below_a_root_the_whole_path_counts(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    first, second = tmp_path / "one" / "w.bin", tmp_path / "two" / "w.bin"
    first.write_bytes(b"a")
    second.write_bytes(b"b")
    before = digest_weights([first, second], root=tmp_path)
    first.write_bytes(b"b")
    second.write_bytes(b"a")
    assert digest_weights([first, second], root=tmp_path) != before


@pytest.mark.parametrize("edges", [False, True])
def test_k1_o2_weights_that_cannot_be_read_are_an_error(tmp_path, edges):
    with pytest.raises(OSError, match="gone"):
        digest_weights([tmp_path / "gone"], edges=edges)


def test_c02_an_unchanged_file_is_read_once_and_a_changed_one_again(tmp_path, reads):
    file = saved(tmp_path / "model.safetensors", b"one" * 1000)
    before = digest_weights([file])
    assert digest_weights([file]) == before
    assert reads == ["model.safetensors"]

    times = file.stat()
    file.write_bytes(b"two" * 1000)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as copies with kept times do
    assert digest_weights([file]) != before
    assert len(reads) == 2


def test_c02_a_file_put_in_anothers_place_is_read_again(tmp_path, reads):
    file, other = tmp_path / "w.bin", tmp_path / "other.bin"
    file.write_bytes(b"one")
    other.write_bytes(b"two")
    saved(other, b"two")
    before = digest_weights([file])
    other.rename(file)
    assert digest_weights([file]) != before


def test_c02_what_has_just_changed_is_not_remembered(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(digests, "_SETTLED_NS", 3600 * 10**9)
    file = tmp_path / "w.bin"
    file.write_bytes(b"one")
    digest_weights([file])
    digest_weights([file])
    assert len(reads) == 2


def test_c02_what_changes_while_it_is_read_is_not_remembered(tmp_path, reads, monkeypatch):
    file = saved(tmp_path / "w.bin", b"one")
    read = digests._full

    def read_and_change(path):
        digest = read(path)
        path.write_bytes(b"two")
        return digest

    monkeypatch.setattr(digests, "_full", read_and_change)
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    during = digest_weights([file])
    monkeypatch.setattr(digests, "_full", read)
    assert digest_weights([file]) != during


def test_c02_without_a_home_every_start_reads(tmp_path, reads, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-that-name")
    file = tmp_path / "w.bin"
    file.write_bytes(b"one")
    digest_weights([file])
    assert reads == ["w.bin"]
    assert "is read as a whole at every start" in caplog.text


@pytest.mark.parametrize("home", ["~nobody-of-that-name", "/proc/no/home"])
def test_r11_without_a_home_there_is_one_warning_for_all_files(tmp_path, monkeypatch, caplog, home):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    files = [tmp_path / f"{number}.bin" for number in range(5)]
    for file in files:
        file.write_bytes(b"one")
    digest_weights(files)
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "5 files" in record.message
    assert str(files[0]) in record.message
    assert "XDG_CACHE_HOME" in record.message


def test_r11_digests_that_can_not_be_written_down_are_told_once(tmp_path, reads, caplog):
    files = [saved(tmp_path / f"{number}.bin", b"one") for number in range(5)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file may have a byte
    try:
        digest_weights(files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "File too large" in record.message
    assert "5 files" in record.message
    digest_weights(files)
    assert len(reads) == 10


@pytest.mark.parametrize("found", [b"", b'[["', b"[]", b'{"a": 1}', b"\xff\xfe", b'"xy"', b"5"])
def test_c32_a_damaged_memory_is_no_answer(tmp_path, reads, found):
    file = saved(tmp_path / "w.bin", b"one")
    before = digest_weights([file])
    [entry] = (tmp_path / "cache/kvtier/weights").iterdir()
    entry.write_bytes(found)
    assert digest_weights([file]) == before
    assert digest_weights([file]) == before
    assert len(reads) == 2


def test_c02_without_a_place_to_remember_every_start_reads_and_says_so(tmp_path, reads, caplog):
    (tmp_path / "cache").write_text("a file where a directory is needed")
    file = tmp_path / "w.bin"
    file.write_bytes(b"one")
    assert digest_weights([file]) == digest_weights([file])
    assert len(reads) == 2
    assert "is read as a whole at every start" in caplog.text


def test_c02_one_of_several_processes_reads_and_the_others_wait_for_it(tmp_path, reads):
    file = saved(tmp_path / "w.bin", b"one")
    digest_weights([file])
    [entry] = (tmp_path / "cache/kvtier/weights").iterdir()
    with entry.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=digest_weights, args=([file],))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join()
    assert reads == ["w.bin"]


def test_what_is_remembered_has_a_bound(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(digests, "_MAX_REMEMBERED", 3)
    for number in range(5):
        file = tmp_path / f"{number}.bin"
        file.write_bytes(b"one")
        digest_weights([file])
    assert len(list((tmp_path / "cache/kvtier/weights").iterdir())) == 3


def test_c02_all_files_that_a_loader_may_read_are_a_models_and_documents_are_not(tmp_path):
    loaded = [
        "model.safetensors",
        "model.pt",
        "model.bin.index.json",
        "modeling_own.py",
        "np/w.0",
        "consolidated.00.pth",
    ]
    for name in [*loaded, "README.md", "plot.PNG", ".git/objects/ab", ".hidden.json", "__pycache__/own.pyc"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    outside = tmp_path.parent / f"{tmp_path.name}-shards"
    outside.mkdir()
    (outside / "shard.gguf").write_bytes(b"x")
    (tmp_path / "linked").symlink_to(outside)
    (outside / "back").symlink_to(tmp_path)
    (tmp_path / "dangling.bin").symlink_to(tmp_path / "gone")
    found = {path.relative_to(tmp_path).as_posix() for path in list_model_files(tmp_path)}
    assert found == {*loaded, "linked/shard.gguf"}


def test_c02_the_order_in_which_a_directory_is_listed_does_not_count(tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "w.bin").write_bytes(b"x")
    (tmp_path / "a").symlink_to("b")
    listed = Path.iterdir
    names = set()
    for backwards in (False, True):
        monkeypatch.setattr(Path, "iterdir", lambda path, way=backwards: sorted(listed(path), reverse=way))
        names.add(tuple(list_model_files(tmp_path)))
    assert len(names) == 1


def test_c02_times_of_an_image_say_nothing_of_what_is_in_another(tmp_path, reads, monkeypatch):
    """Images whose times are all the same can be mounted one after the other where the other was."""
    file = saved(tmp_path / "w.bin", b"one")
    assert digests._tells_changes(file.stat().st_ctime_ns, is_read_only=True)
    assert digests._tells_changes(5 * 10**9, is_read_only=False)
    assert not digests._tells_changes(5 * 10**9, is_read_only=True)
    monkeypatch.setattr(digests, "_tells_changes", lambda _ctime, *, is_read_only: False)
    assert digest_weights([file]) == digest_weights([file])
    assert len(reads) == 2


def test_c31_a_process_that_keeps_the_memory_to_itself_holds_nobody_up(tmp_path, reads, monkeypatch, caplog):
    monkeypatch.setattr(digests, "_PATIENCE_S", 0.05)
    file = saved(tmp_path / "w.bin", b"one")
    before = digest_weights([file])
    [entry] = (tmp_path / "cache/kvtier/weights").iterdir()
    with entry.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert digest_weights([file]) == before
    assert "it hangs, or left a child behind" in caplog.text
    assert reads == ["w.bin"] * 2


def test_c02_f2_a_process_began_before_what_it_writes_and_after_what_was_there(tmp_path):
    (tmp_path / "before").touch()
    time.sleep(0.1)
    program = (
        "import sys; from pathlib import Path; from kvtier_weights import process_began_ns; "
        "Path(sys.argv[1]).touch(); print(process_began_ns())"
    )
    run = [sys.executable, "-c", program, str(tmp_path / "after")]
    began_ns = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()[-1])
    assert (tmp_path / "before").stat().st_ctime_ns < began_ns < (tmp_path / "after").stat().st_ctime_ns
    assert process_began_ns() < began_ns
