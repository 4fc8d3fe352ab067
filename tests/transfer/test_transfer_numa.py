"""Processors near a GPU, by a driver and a /sys of the test's."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvtier_core.transfer import cpus_near

_GPU = torch.device("cuda", 1)


@pytest.fixture
def sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes with some of this machine's processors, and a GPU on the second one."""
    for node, listed in enumerate(("0-3,8", "4-7,10-11")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{listed}\n")
    gpu = tmp_path / "bus/pci/devices/0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 6, 11})
    return tmp_path


def _driver(error: int = 0) -> SimpleNamespace:
    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int)
    def get(device, ordinal):
        device[0] = 40 + ordinal
        return error

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    def address(room, size, device):
        assert device == 41
        text = b"0000:3B:00.0\0"
        assert len(text) <= size
        ctypes.memmove(room, text, len(text))
        return 0

    return SimpleNamespace(cuDeviceGet=get, cuDeviceGetPCIBusId=address)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Puts a driver in the place of NVIDIA's."""

    def put(driver: object) -> None:
        def find(name: str) -> object:
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("no such file")
            return driver

        monkeypatch.setattr("kvtier_core.transfer.numa.ctypes.CDLL", find)

    return put


def test_the_processors_of_the_gpus_node_that_may_be_used(sys: Path, load: Callable[[object], None]) -> None:
    load(_driver())
    assert cpus_near(_GPU, sys) == frozenset({4, 6, 11})


@pytest.mark.parametrize("driver", [None, _driver(error=3)])
def test_nobody_says_where_a_gpu_is(sys: Path, load: Callable[[object], None], driver: object) -> None:
    load(driver)
    assert cpus_near(_GPU, sys) is None


def test_a_machine_with_one_node_a_foreign_node_and_a_cpu(
    sys: Path, load: Callable[[object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(_driver())
    assert cpus_near(torch.device("cpu"), sys) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert cpus_near(_GPU, sys) is None
    (sys / "bus/pci/devices/0000:3b:00.0/numa_node").write_text("-1\n")
    assert cpus_near(_GPU, sys) is None
