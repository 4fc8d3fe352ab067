"""Which accelerators torch sees, and whether kvtier copies right from each: for a person who asks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier_core.proof import row_bytes_for
from kvtier_core.transfer import KVLayout, Pool, PoolGeometry, SelfTestError, open_device

if TYPE_CHECKING:
    import torch

    from kvtier_core.transfer import SelfTestReport

_TENSORS = 4
_BLOCKS = 32
_PAGE_BYTES = 256 << 10
_NUM_ROWS = 32
_SHUTDOWN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class AcceleratorReport:
    """What came of one accelerator: a self-test that was passed, or a problem."""

    device: str
    name: str
    passed: "SelfTestReport | None" = None
    problem: str | None = None


def examine_accelerators() -> Iterator[AcceleratorReport]:
    """The self-test on every accelerator that torch sees, on 32 MiB of its memory; nothing where there is no torch.

    Takes a second each, and 33 MiB of the machine's memory.
    """
    try:
        import torch  # noqa: PLC0415 - only here, and only if it is there
    except ImportError:
        return
    for index in range(torch.cuda.device_count()):
        yield _examine(torch.device("cuda", index), torch.cuda.get_device_name(index))
    others = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if others is not None and others.type != "cuda":
        for index in range(torch.accelerator.device_count()):
            yield _examine(torch.device(others.type, index), others.type)


def _examine(device: "torch.device", name: str) -> AcceleratorReport:
    passed = problem = None
    try:
        passed = _try(_make_layout(device))
    except SelfTestError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - whatever the driver says is the answer
        problem = f"{type(error).__name__}: {error}"
    return AcceleratorReport(device=str(device), name=name, passed=passed, problem=problem)


def _try(layout: KVLayout) -> "SelfTestReport":
    from kvtier_core.transfer import self_test  # noqa: PLC0415 - brings in torch

    row_bytes = row_bytes_for(max(layout.payload_bytes))
    with Pool.create(PoolGeometry(num_rows=_NUM_ROWS, row_bytes=row_bytes)) as pool:
        device = open_device(layout, pool)
        try:
            return self_test(device, layout, pool)
        finally:
            device.shutdown(_SHUTDOWN_S)


def _make_layout(device: "torch.device") -> KVLayout:
    import torch  # noqa: PLC0415

    size = (_BLOCKS, _PAGE_BYTES)
    return KVLayout([torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(_TENSORS)])
