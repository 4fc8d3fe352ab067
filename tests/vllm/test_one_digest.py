"""Of several workers one reads the weights' files and tells the others (V15)."""

import ctypes
import os
import shutil
import struct

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")
NUM_FILES = 20


class Watch:
    """What has been opened in a directory since, by name, as the kernel says."""

    def __init__(self, directory):
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0, os.strerror(ctypes.get_errno())
        assert libc.inotify_add_watch(self._fd, os.fsencode(directory), _IN_OPEN) >= 0

    def take(self):
        names: list[str] = []
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return names
            while data:
                size = _EVENT.unpack_from(data)[3]
                names.append(data[_EVENT.size : _EVENT.size + size].rstrip(b"\0").decode())
                data = data[_EVENT.size + size :]

    def close(self):
        os.close(self._fd)


def test_v15_one_worker_digests_the_models_files_and_the_others_have_its_digest(
    start, tmp_path, model, plain
):
    """Code that nobody imports is among the files that count, and only kvtier reads it."""
    own = tmp_path / "model"
    shutil.copytree(model, own)
    names = {f"modeling_{number}.py" for number in range(NUM_FILES)}
    for name in names:
        (own / name).write_text("pass")
    watch = Watch(own)
    engine = start(
        connector(disk(tmp_path / "root")),
        model=own,
        processes=4,
        tensor_parallel_size=2,
        environment={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    opened = [name for name in watch.take() if name in names]
    watch.close()
    assert sorted(opened) == sorted(names)
    wanted = prompt(1)
    assert engine.generate(wanted) == plain.generate(wanted)
    assert engine.close() == 0
