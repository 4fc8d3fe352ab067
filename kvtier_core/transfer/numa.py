"""Which processors are near a GPU: memory lies on the NUMA node of the processor that touches it first."""

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SYS = Path("/sys")
_ADDRESS_BYTES = 32


def cpus_near(device: "torch.device", sys: Path = _SYS) -> frozenset[int] | None:
    """Those on the device's NUMA node that this process may use; ``None`` where nobody says, or it may use none.

    NVIDIA's driver and the kernel say it of a GPU that torch calls ``cuda``.
    """
    address = _find_pci_address(device.index or 0) if device.type == "cuda" else None
    if address is None:
        return None
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (sys / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):  # the node is -1 on a machine that has one
        return None
    return frozenset(_parse(listed)) & os.sched_getaffinity(0) or None


def _parse(listed: str) -> list[int]:
    """``"0-3,8"``."""
    ends = [part.partition("-") for part in listed.strip().split(",") if part]
    return [cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)]


def _find_pci_address(ordinal: int) -> str | None:
    """Such as ``0000:3b:00.0``, of the GPU with this number among the visible ones."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, address = ctypes.c_int(), ctypes.create_string_buffer(_ADDRESS_BYTES)
    if driver.cuDeviceGet(ctypes.byref(device), ordinal) != 0:
        return None
    if driver.cuDeviceGetPCIBusId(address, _ADDRESS_BYTES, device) != 0:
        return None
    return address.value.decode().lower()
