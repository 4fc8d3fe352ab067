"""Deliberate mistakes in the CUDA device, each of which the simulated GPU must see.

Most are in the order of compute, copies and result, which no look at the bytes of one copy could find. The others are
in where bytes go: they show that the runs look everywhere.
"""

from dataclasses import dataclass

from tests.coordinator.mutate import changed
from tests.transfer.simgpu.run import Run

RUNS = 60
"""A mutant that this many runs do not see survives. Most are seen by the first."""

_TO_ROW = "self._row(group, row, slot, length).copy_(piece, non_blocking=self._queues)"
_FROM_ROW = "piece.copy_(self._row(group, row, slot, length), non_blocking=self._queues)"
_GATHER = "torch.index_select(pages, 0, batch.blocks, out=places)"
_SCATTER = "pages.index_copy_(0, batch.blocks, places)"
_OWN_STREAM = "with torch.cuda.stream(torch.cuda.Stream(self._device)): "


@dataclass(frozen=True)
class Mutant:
    """*new* instead of *old* in the function *place* of ``kvtier_core.transfer``."""

    name: str
    place: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "a store does not wait for compute",
        "cuda:CUDADevice._mark_compute",
        "return event.synchronize",
        "return None",
    ),
    Mutant(
        "a load does not wait for compute",
        "cuda:CUDADevice._mark_compute",
        "return partial(self._streams[direction].wait_event, event)",
        "return None",
    ),
    Mutant(
        "compute's event is never recorded",
        "cuda:CUDADevice._mark_compute",
        "event.record(torch.cuda.current_stream(self._layout.device))",
        "",
    ),
    Mutant(
        "compute's event is recorded on the copies' stream",
        "cuda:CUDADevice._mark_compute",
        "event.record(torch.cuda.current_stream(self._layout.device))",
        "event.record(self._streams[direction])",
    ),
    Mutant(
        "the other direction's stream waits for a load's compute",
        "cuda:CUDADevice._mark_compute",
        "partial(self._streams[direction].wait_event, event)",
        "partial(self._streams[Direction.STORE].wait_event, event)",
    ),
    Mutant("the result comes before the copies", "cuda:CUDADevice._settle", "event.synchronize()", ""),
    Mutant(
        "a store's result comes before its copies",
        "cuda:CUDADevice._settle",
        "event.synchronize()",
        "if direction is Direction.LOAD: event.synchronize()",
    ),
    Mutant(
        "a load's result comes before its copies",
        "cuda:CUDADevice._settle",
        "event.synchronize()",
        "if direction is Direction.STORE: event.synchronize()",
    ),
    Mutant(
        "the event that is waited for was recorded before the copies",
        "cuda:CUDADevice._settle",
        "event.record(self._streams[direction])\nevent.synchronize()",
        "event.synchronize()\nevent.record(self._streams[direction])",
    ),
    Mutant(
        "the result waits for the other direction's copies",
        "staged:StagedDevice._copy",
        "self._settle(direction)",
        "self._settle(Direction.STORE if direction is Direction.LOAD else Direction.LOAD)",
    ),
    Mutant(
        "loads are queued on the stores' stream",
        "cuda:CUDADevice._on",
        "self._streams[direction]",
        "self._streams[Direction.STORE]",
    ),
    Mutant(
        "each job's copies have a stream of their own",
        "cuda:CUDADevice._on",
        "torch.cuda.stream(self._streams[direction])",
        "torch.cuda.stream(torch.cuda.Stream(self._device))",
    ),
    Mutant(
        "each copy to a row has a stream of its own",
        "staged:StagedDevice._store",
        _TO_ROW,
        _OWN_STREAM + _TO_ROW,
    ),
    Mutant(
        "each copy from a row has a stream of its own",
        "staged:StagedDevice._load",
        _FROM_ROW,
        _OWN_STREAM + _FROM_ROW,
    ),
    Mutant(
        "each gather has a stream of its own", "staged:StagedDevice._store", _GATHER, _OWN_STREAM + _GATHER
    ),
    Mutant(
        "each scatter has a stream of its own", "staged:StagedDevice._load", _SCATTER, _OWN_STREAM + _SCATTER
    ),
    Mutant(
        "the ids' way to the device has a stream of its own",
        "cuda:CUDADevice._to_device",
        "return numbers.pin_memory().to(self._device, non_blocking=True)",
        _OWN_STREAM + "return numbers.pin_memory().to(self._device, non_blocking=True)",
    ),
    Mutant(
        "both directions share a staging buffer",
        "staged:StagedDevice._copy",
        "self._staging[direction]",
        "self._staging[Direction.STORE]",
    ),
    Mutant(
        "a job dropped at shutdown is said to be done",
        "lanes:LaneDevice._carry_out",
        "ended(ok=False, dropped=True)",
        "ended(ok=True)",
    ),
    Mutant(
        "jobs queued at shutdown get no result",
        "lanes:LaneDevice._next",
        "queue.popleft() if queue else None",
        "queue.popleft() if queue and not self._is_stopping else None",
    ),
    Mutant(
        "blocks lie side by side, whatever the stride",
        "staged:_as_items",
        "(tensor.stride(0), 1)",
        "(tensor.numel() // num_blocks, 1)",
    ),
    Mutant("rows are off by one", "staged:StagedDevice._row", "group.rows[row]", "group.rows[row - 1]"),
    Mutant(
        "slots count from the row's first",
        "staged:StagedDevice._row",
        "group.rows[row, slot : slot + length]",
        "group.rows[row, :length]",
    ),
    Mutant(
        "half of each batch stays where it is",
        "staged:StagedDevice._store",
        "batch.pieces",
        "batch.pieces[: len(batch.pieces) // 2]",
    ),
    Mutant(
        "a group has one batch",
        "staged:StagedDevice._batches_of",
        "begin = end",
        "break",
    ),
    Mutant(
        "every group uses the first one's ids",
        "staged:StagedDevice._batches",
        "blocks_there = blocks_there[count:]",
        "",
    ),
    Mutant(
        "all pages of a block go to the place of its first",
        "staged:_Group.places",
        "items[:, offset : offset + pages.shape[1]]",
        "items[:, : pages.shape[1]]",
    ),
)


def kill(mutant: Mutant) -> str | None:
    """What saw it first; ``None`` when nothing did."""
    with changed(f"kvtier_core.transfer.{mutant.place}", mutant.old, mutant.new):
        for seed in range(RUNS):
            if wrong := Run(seed).run().wrong:
                return f"seed {seed}: {wrong[0]}"
    return None
