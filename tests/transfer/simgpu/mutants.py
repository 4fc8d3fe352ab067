"""Deliberate mistakes in the CUDA device, each of which the simulated GPU must see.

Most are in the order of compute, copies and result, which no look at the bytes of one copy could find. The others are
in where bytes go: they show that the runs look everywhere.
"""

from dataclasses import dataclass

from tests.coordinator.mutate import changed
from tests.transfer.simgpu.run import Run

RUNS = 60
"""A mutant that this many runs do not see survives. Most are seen by the first."""

_WAIT = "stream.wait_stream(self._torch.current_stream(self._layout.device))"
_OWN_STREAM = "with torch.cuda.stream(torch.cuda.Stream(None)): "
_CALL = "self._copy_batch(sources[some], targets[some], sizes[some])"
_GATHER = "torch.index_select(pages, 0, blocks, out=places)"
_SCATTER = "pages.index_copy_(0, blocks, places)"
_TO_DEVICE = "there.copy_(here, non_blocking=True)"


@dataclass(frozen=True)
class Mutant:
    """*new* instead of *old* in the function *place* of ``kvtier_core.transfer``."""

    name: str
    place: str
    old: str
    new: str


MUTANTS = (
    Mutant("nothing waits for compute", "streams:StreamDevice._begin", _WAIT, ""),
    Mutant(
        "a store does not wait for compute",
        "streams:StreamDevice._begin",
        _WAIT,
        f"if direction is Direction.LOAD: {_WAIT}",
    ),
    Mutant(
        "a load does not wait for compute",
        "streams:StreamDevice._begin",
        _WAIT,
        f"if direction is Direction.STORE: {_WAIT}",
    ),
    Mutant(
        "the copies' stream waits for itself",
        "streams:StreamDevice._begin",
        _WAIT,
        "stream.wait_stream(stream)",
    ),
    Mutant(
        "the other direction's stream waits for compute",
        "streams:StreamDevice._begin",
        _WAIT,
        _WAIT.replace("stream.", "self._streams[Direction.STORE].", 1),
    ),
    Mutant(
        "the result comes before the copies",
        "streams:StreamDevice._begin",
        "return Copies(end, ended.query)",
        "return Copies(partial(Outcome, bytes=moved))",
    ),
    Mutant(
        "a result does not wait for the event",
        "streams:StreamDevice._begin",
        "ended.synchronize()",
        "",
    ),
    Mutant(
        "the result waits for the engine's stream",
        "streams:StreamDevice._begin",
        "ended.record(stream)",
        "ended.record(self._torch.current_stream(self._layout.device))",
    ),
    Mutant(
        "the result waits for the other direction's copies",
        "streams:StreamDevice._begin",
        "ended.record(stream)",
        "ended.record(self._streams[Direction.STORE if direction is Direction.LOAD else Direction.LOAD])",
    ),
    Mutant(
        "loads are queued on the stores' stream",
        "streams:StreamDevice._begin",
        "self._torch.stream(stream)",
        "self._torch.stream(self._streams[Direction.STORE])",
    ),
    Mutant(
        "each job's copies have a stream of their own",
        "streams:StreamDevice._begin",
        "self._torch.stream(stream)",
        "self._torch.stream(self._torch.Stream(self._layout.device))",
    ),
    Mutant(
        "each call for copies has a stream of its own",
        "streams:StreamDevice._copy",
        _CALL,
        _OWN_STREAM + _CALL,
    ),
    Mutant("each gather has a stream of its own", "streams:_Group.gather", _GATHER, _OWN_STREAM + _GATHER),
    Mutant(
        "each scatter has a stream of its own", "streams:_Group.scatter", _SCATTER, _OWN_STREAM + _SCATTER
    ),
    Mutant(
        "the ids' way to the device has a stream of its own",
        "streams:_Staging.bring",
        _TO_DEVICE,
        _OWN_STREAM + _TO_DEVICE,
    ),
    Mutant(
        "ids are written over those on their way",
        "streams:_Staging.bring",
        "self._on_their_way.popleft()[1].synchronize()",
        "self._on_their_way.popleft()",
    ),
    Mutant(
        "nothing says when ids have come",
        "streams:_Staging.bring",
        "event.record()",
        "",
    ),
    Mutant(
        "ids go round too early",
        "streams:_Staging.bring",
        "self._on_their_way[0][0] + size < begin + len(ids)",
        "self._on_their_way[0][0] + size < begin",
    ),
    Mutant(
        "both directions share a staging buffer",
        "streams:StreamDevice._queue",
        "staging.memory",
        "self._staging[Direction.STORE].memory",
    ),
    Mutant(
        "rows are said to be free when copies are queued",
        "lanes:LaneDevice.submit",
        "self._under_way[direction].append(_Job(job_id, copies))",
        "self._under_way[direction].append(_Job(job_id, copies))\n"
        "self._control.finish(self._worker, direction, job_id)",
    ),
    Mutant(
        "a job whose end two threads see has two results",
        "lanes:LaneDevice._end",
        "if not jobs or jobs[0] is not job: return",
        "if not jobs or jobs[0] is not job:\n    self._results.append(result)\n    return",
    ),
    Mutant(
        "jobs under way at shutdown get no result",
        "lanes:LaneDevice._next",
        "jobs[0] if jobs else None",
        "jobs[0] if jobs and not self._is_stopping else None",
    ),
    Mutant(
        "blocks lie side by side, whatever the stride",
        "streams:_Group.__init__",
        "self._strides = np.array([tensor.stride(0) * tensor.element_size() for tensor in group.tensors])",
        "self._strides = np.array(group.page_bytes)",
    ),
    Mutant(
        "gathered blocks lie side by side, whatever the stride",
        "streams:_as_items",
        "(tensor.stride(0), 1)",
        "(tensor.numel() // num_blocks, 1)",
    ),
    Mutant(
        "rows are off by one",
        "streams:_Group.find",
        "rows * self._row_bytes",
        "np.maximum(rows - 1, 0) * self._row_bytes",
    ),
    Mutant(
        "slots count from the row's first",
        "streams:_Group.find",
        "slots * self._slot_bytes",
        "0 * slots",
    ),
    Mutant(
        "slots have the room of one worker's pages",
        "streams:_Group.find",
        "slots * self._slot_bytes",
        "slots * self.block_bytes",
    ),
    Mutant(
        "pages that lie apart in a slot are gathered",
        "streams:_Group.__init__",
        "len(group.pieces) == 1",
        "True",
    ),
    Mutant(
        "blocks of neighbouring rows go to the first of these rows",
        "streams:_Group.find",
        "self._slot_bytes if self._has_slots else self._row_bytes",
        "self._slot_bytes",
    ),
    Mutant(
        "all pages of a block go to the place of its first",
        "streams:_Group.pages",
        "places[:, None] + self._offsets",
        "places[:, None] + 0 * self._offsets",
    ),
    Mutant(
        "all gathered pages of a block go to the place of its first",
        "streams:_Group._places",
        "offset // pages.element_size()",
        "0 * offset",
    ),
    Mutant(
        "all pages are as long as the shortest",
        "streams:_Group.pages",
        "np.broadcast_to(self._sizes, pages.shape)",
        "np.broadcast_to(self._sizes.min(), pages.shape)",
    ),
    Mutant(
        "of neighbours the first is copied",
        "streams:_join",
        "np.diff(starts, append=len(ones)) * size",
        "np.full(len(starts), size)",
    ),
    Mutant(
        "a job has one call for copies",
        "streams:StreamDevice._copy",
        "range(0, len(sizes), _COPIES_A_CALL)",
        "range(0, min(len(sizes), _COPIES_A_CALL), _COPIES_A_CALL)",
    ),
    Mutant(
        "a group has one round of gathering",
        "streams:StreamDevice._queue",
        "range(0, len(blocks), room)",
        "range(0, min(len(blocks), room), room)",
    ),
    Mutant(
        "each round gathers the same blocks",
        "streams:StreamDevice._queue",
        "blocks[begin : begin + room]",
        "blocks[: len(places[begin : begin + room])]",
    ),
)


def kill(mutant: Mutant) -> str | None:
    """What saw it first; ``None`` when nothing did."""
    with changed(f"kvtier_core.transfer.{mutant.place}", mutant.old, mutant.new):
        for seed in range(RUNS):
            if wrong := Run(seed).run().wrong:
                return f"seed {seed}: {wrong[0]}"
    return None
