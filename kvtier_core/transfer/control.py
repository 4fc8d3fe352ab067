"""The control page (contract C36): shared words that say which device transfers may still touch a row.

It decides, in the scheduler's process, when the rows of an unfinished transfer may be handed out again, and
in each worker, whether a transfer may still start. It never touches a row and never waits.

Each word is a 64-bit counter with one writer. The scheduler writes the *epoch*, and that it came. Each worker writes,
per direction, the last job it *started*, the last it *finished*, and the last of those that did not move its bytes
(*failed*, or dropped, or handed to a process that died before it began them), and the last that was *handed* to it; job
ids of one direction grow and its jobs complete in order.

The race, step by step. The scheduler wants the rows of job J (epoch E) back while a worker may be about to
start it::

    scheduler                              worker
    S1  epoch := E + 1                     W1  started := J        (announce)
    S2  full fence                         W2  full fence
    S3  read started                       W3  read epoch
    S4  started < J: rows are free         W4  epoch = E: touch the rows, then finished := J
        started >= J: wait for finished        epoch > E: drop J, finished := J

Harm needs S3 to miss W1 *and* W3 to miss S1. With a full fence on both sides one of the two fences comes
first in the order all processors agree on; what stands before it is seen by what stands after the other. So
either S3 sees the announcement (and waits), or W3 sees the new epoch (and drops). Checking the epoch first
and announcing after, or leaving out either fence (a processor may delay a write past a later read), lets both
miss.

The fence in Python is ``_fence``: acquire, release, acquire, release of a lock. Assumptions: on x86-64 each
of these is a locked instruction, which is a full fence; on AArch64 a release followed by an acquire is one; a
word is read and written by one aligned 8-byte access (CPython's ``memoryview`` of format ``Q`` copies 8
bytes). Tested on x86-64 only.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

from kvtier_core.transfer.direction import Direction

PAGE_BYTES = 4096

_WORD = 8
_SLOT_WORDS = 16
"""Two 64-byte cache lines for the epoch and two for each worker, so that writers do not slow each other down."""

_EPOCH = 0
_SCHEDULER_CAME = 1
_WORKER_CAME = 8
_STARTED = {Direction.STORE: 0, Direction.LOAD: 2}
_FINISHED = {Direction.STORE: 1, Direction.LOAD: 3}
_FAILED = {Direction.STORE: 4, Direction.LOAD: 5}
_HANDED = {Direction.STORE: 6, Direction.LOAD: 7}


def control_words_bytes(num_workers: int) -> int:
    """The room that the words of *num_workers* take."""
    return (1 + num_workers) * _SLOT_WORDS * _WORD


class Progress(NamedTuple):
    """How far a worker is in one direction; 0 before the first.

    Its last finished job, and the last of those that failed, or that it may never have begun.
    """

    finished: int
    failed: int


class ControlPage:
    """The words, in the pool's shared memory. Made by ``Pool``; safe from any thread of any process.

    A worker that dies in the middle of a job never finishes it: its job stays unsettled, and its rows out of
    use. No later process can be that worker of that pool, or its first job would settle the dead one's.
    """

    def __init__(self, memory: memoryview, num_workers: int) -> None:
        """*memory*: shared, writable, 64-byte aligned, of at least ``control_words_bytes(num_workers)``."""
        self.num_workers = num_workers
        self._words = memory[: control_words_bytes(num_workers)].cast("Q")
        self._begun: set[tuple[int, Direction]] = set()
        """The workers and directions that this process has begun jobs of. Each is one thread's alone."""
        self._devices: dict[int, object] = {}
        self._devices_lock = threading.Lock()
        self._fence_lock = threading.Lock()
        self._bump_lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """The epoch that jobs submitted now belong to."""
        return self._words[_EPOCH]

    @property
    def scheduler_came(self) -> bool:
        """Whether this pool has, or had, a scheduler."""
        return self._words[_SCHEDULER_CAME] != 0

    def note_scheduler(self) -> None:
        """Say that the scheduler has come. Scheduler side."""
        self._words[_SCHEDULER_CAME] = 1

    def worker_came(self, worker: int) -> bool:
        """Whether this pool has, or had, this worker."""
        return self._words[self._index(worker, _WORKER_CAME)] != 0

    def note_worker(self, worker: int) -> None:
        """Say that this worker has come. Worker side."""
        self._words[self._index(worker, _WORKER_CAME)] = 1

    def use_worker(self, worker: int) -> Callable[[], None]:
        """A device is to write this worker's words, until it calls what this returns (twice is fine). Worker side.

        Raises ``ValueError`` when another device of this process does, or the worker is not one of this page's.
        """
        self._index(worker, 0)
        device = object()
        with self._devices_lock:
            if self._devices.setdefault(worker, device) is not device:
                raise ValueError(
                    f"worker {worker} of this pool has a device already: shut that down first, or give this one a "
                    "number of its own"
                )

        def leave() -> None:
            with self._devices_lock:
                if self._devices.get(worker) is device:
                    del self._devices[worker]

        return leave

    def bump_epoch(self) -> int:
        """Begin a new epoch and return it: every job that no worker has announced yet will be dropped.

        Scheduler side: one process only.
        """
        with self._bump_lock:
            epoch = self._words[_EPOCH] + 1
            self._words[_EPOCH] = epoch
        self._fence()
        return epoch

    def is_settled(self, direction: Direction, job_id: int, epoch: int) -> bool:
        """Whether no worker touches the rows of this job any more, now or later. Scheduler side.

        *epoch* is the one the job was submitted with. True when every worker has finished or dropped the job,
        or will drop it because it had not announced it when the epoch changed.
        """
        is_old = epoch != self.epoch
        for worker in range(self.num_workers):
            if self.get_last_finished(worker, direction) >= job_id:
                continue
            if is_old and self.get_last_started(worker, direction) < job_id:
                continue
            return False
        # Whoever reads the rows next must see what the workers wrote before they said "finished".
        self._fence()
        return True

    @property
    def is_idle(self) -> bool:
        """Whether every worker is done with every job that was handed to it by now. Any side."""
        return all(
            self.get_last_finished(worker, direction) >= self._words[self._index(worker, _HANDED[direction])]
            for worker in range(self.num_workers)
            for direction in Direction
        )

    def hand(self, worker: int, direction: Direction, job_id: int) -> None:
        """Say that this worker has a job in its line, whose turn may come late. Worker side."""
        self._words[self._index(worker, _HANDED[direction])] = job_id

    def begin(self, worker: int, direction: Direction, job_id: int, epoch: int) -> bool:
        """Announce a job, before touching a row; True: its rows may be touched until ``finish``. Worker side.

        False: the job is of another epoch, has been dropped, and counts as finished. Raises ``ValueError``
        when the job id does not grow, the worker's last one has not ended, or the worker is not one of this
        page's. One job per worker and direction at a time.
        """
        started = self._index(worker, _STARTED[direction])
        if job_id <= self._words[started]:
            raise ValueError(
                f"{direction.value} job {job_id} of worker {worker} is not above its last, "
                f"{self._words[started]}"
            )
        if (last := self.get_unfinished(worker, direction)) is not None:
            raise ValueError(
                f"{direction.value} job {last} of worker {worker} has not ended, and {job_id} would settle it: two "
                "devices use one worker number, or a process died in the middle of that job"
            )
        self._doubt_what_nobody_began(worker, direction, job_id)
        self._words[started] = job_id
        self._fence()
        if self.epoch == epoch:
            return True
        self.finish(worker, direction, job_id, ok=False)
        return False

    def _doubt_what_nobody_began(self, worker: int, direction: Direction, job_id: int) -> None:
        """What was handed to a process that died before it began would else look finished with this job."""
        if (worker, direction) in self._begun:
            return
        self._begun.add((worker, direction))
        if job_id - 1 > self.get_last_finished(worker, direction):
            self._words[self._index(worker, _FAILED[direction])] = job_id - 1

    def finish(self, worker: int, direction: Direction, job_id: int, *, ok: bool) -> None:
        """Say that this worker will not touch the job's rows any more. Worker side, after the last byte.

        *ok*: this worker's bytes of the job are all there.
        """
        assert job_id == self.get_last_started(worker, direction), "finish follows begin of the same job"
        if not ok:
            self._words[self._index(worker, _FAILED[direction])] = job_id
        self._fence()
        self._words[self._index(worker, _FINISHED[direction])] = job_id

    def get_last_started(self, worker: int, direction: Direction) -> int:
        """The last job this worker announced; 0 before the first."""
        return self._words[self._index(worker, _STARTED[direction])]

    def get_last_finished(self, worker: int, direction: Direction) -> int:
        """The last job this worker finished or dropped; 0 before the first."""
        return self._words[self._index(worker, _FINISHED[direction])]

    def get_unfinished(self, worker: int, direction: Direction) -> int | None:
        """The job this worker announced and has not finished: it is at it, or died in the middle of it."""
        started = self.get_last_started(worker, direction)
        return None if started == self.get_last_finished(worker, direction) else started

    def get_progress(self, worker: int, direction: Direction) -> Progress:
        """How far this worker is, read in the order that can only make a job look worse than it is. Scheduler side.

        A worker says that a job failed before it says that it finished; here it is read after. Later jobs may have
        failed meanwhile: ``JobTally`` then doubts the earlier ones.
        """
        finished = self.get_last_finished(worker, direction)
        self._fence()
        return Progress(finished, self._words[self._index(worker, _FAILED[direction])])

    def release(self) -> None:
        """Let go of the shared memory; every other method raises ``ValueError`` afterwards. For the pool."""
        self._words.release()

    def _index(self, worker: int, word: int) -> int:
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker {worker} is not one of this pool's {self.num_workers}")
        return (1 + worker) * _SLOT_WORDS + word

    def _fence(self) -> None:
        """Keep all accesses before this point before all after it, as every process sees them (see above)."""
        with self._fence_lock:
            pass
        with self._fence_lock:
            pass
