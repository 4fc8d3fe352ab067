"""KV memory in every shape a device must move, and what rows must hold, made without the code under test."""

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtier_core.transfer import Direction, GroupTransfer, KVGroup, KVLayout
from kvtier_core.transfer.lanes import Copies, LaneDevice, Outcome
from kvtier_core.transfer.plan import Ids
from tests.transfer.conftest import TIMEOUT_S

BLOCKS = 24
_LAYERS = 60
_PAGE = 12288
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def one(block_ids: Ids, rows: Ids) -> list[GroupTransfer]:
    """A transfer of whole blocks of the only group."""
    return [GroupTransfer(block_ids=block_ids, rows=rows)]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, not random numbers: NaN payloads and all must survive."""
    generator = torch.Generator().manual_seed(seed)
    shape_in_bytes = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape_in_bytes, dtype=torch.uint8, generator=generator).view(dtype)


def _page(tensor: torch.Tensor, block: int) -> bytes:
    return tensor[block].cpu().contiguous().view(torch.uint8).numpy().tobytes()


def payload(tensors: list[torch.Tensor], block: int) -> bytes:
    """What a row must hold, put together without the code under test."""
    return b"".join(_page(tensor, block) for tensor in tensors)


def spread(tensors: Sequence[torch.Tensor], chance: random.Random) -> KVGroup:
    """A group of *tensors* whose pages lie anywhere in a slot, with room between them."""
    sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
    places = dict.fromkeys(range(len(sizes)), 0)
    end = 0
    for index in chance.sample(range(len(sizes)), len(sizes)):
        places[index] = end + chance.choice((0, 0, 24))
        end = places[index] + sizes[index]
    return KVGroup(tensors, page_offsets=list(places.values()), slot_bytes=end + chance.choice((0, 8)))


def places(layout: KVLayout, group: int, worker: int, slot: int) -> npt.NDArray[np.int64]:
    """The bytes of a row that a block in *slot* has, in the order of its pages."""
    shape = layout.groups[group]
    begin = worker * layout.payload_bytes[group] + slot * shape.slot_bytes
    pages = zip(shape.page_offsets, shape.page_bytes, strict=True)
    return np.concatenate([np.arange(begin + offset, begin + offset + size) for offset, size in pages])


def _block_major(dtype: torch.dtype) -> list[torch.Tensor]:
    return [random_tensor((BLOCKS, _LAYERS, 2, _PAGE // 2 // dtype.itemsize), dtype)]


def _layer_major(dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (BLOCKS, 16, 3, _PAGE // 48 // dtype.itemsize)
    return [random_tensor(shape, dtype, seed=layer) for layer in range(_LAYERS)]


def _strided(dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers that are slices of one tensor, with room between the blocks of each."""
    whole = random_tensor((BLOCKS, _LAYERS, _PAGE // dtype.itemsize), dtype)
    return [whole[:, layer] for layer in range(_LAYERS)]


def _k_and_v(dtype: torch.dtype) -> list[torch.Tensor]:
    both = random_tensor((2, BLOCKS, 8, 64), dtype)
    return [both[0], both[1]]


def _uneven(dtype: torch.dtype) -> list[torch.Tensor]:
    return [random_tensor((BLOCKS, width), dtype, seed=width) for width in (1, 7, 300, 2)]


LAYOUTS = [_block_major, _layer_major, _strided, _k_and_v, _uneven]


def said_to_be_on_a_gpu(layout: KVLayout, kind: str = "cuda") -> KVLayout:
    """The same layout, which the CUDA device takes; the tensors stay where there is memory."""
    object.__setattr__(layout, "device", torch.device(kind, 0))
    return layout


def row_bytes(layout: KVLayout, num_workers: int = 1) -> int:
    return -(-(num_workers * max(layout.payload_bytes) + 64) // 4096) * 4096  # 64: the proof


class Gate:
    """Compute that has not ended: holds whoever waits for it, and says when somebody does."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._opened.wait(TIMEOUT_S)

    def open(self) -> None:
        self._opened.set()


def after(
    compute_done: Callable[[], object] | None,
    device: LaneDevice,
    direction: Direction,
    job_id: int,
    parts: Sequence[GroupTransfer],
) -> None:
    """Submit a transfer that follows compute which *compute_done* waits for, as on a device with compute of its own."""
    begin = device._begin

    def begin_after(direction: Direction, parts: Sequence[GroupTransfer]) -> Copies:
        end = begin(direction, parts).end

        def wait_and_end() -> Outcome:
            if compute_done is not None:
                compute_done()
            return end()

        return Copies(wait_and_end)

    device._begin = begin_after  # type: ignore[method-assign]
    try:
        device.submit(direction, job_id, parts)
    finally:
        del device._begin
