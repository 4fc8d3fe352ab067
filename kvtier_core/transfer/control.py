"""The control page (C36): shared words that say which device transfers may still touch a row.

The scheduler's process learns from it when the rows of a transfer may be handed out again. The page never waits.

Each word is a 64-bit counter with one writer. Every member writes that it came, and each worker for each direction the
last job that it *announced*, and that it *finished*. Job ids of one direction grow, and its jobs complete in order.
A worker also writes that it can't copy any more.

A worker announces a job when that is handed to it, before it touches a row, and writes *finished* after its last byte,
with a full fence in between. ``_fence`` acquires and releases a lock twice. On x86-64 each of these is a locked
instruction, which is a full fence. On AArch64 a release followed by an acquire is one. A word is read and written by
one aligned 8-byte access (CPython's ``memoryview`` of format ``Q`` copies 8 bytes). Tested on x86-64 only.
"""

import threading

from kvtier_core.transfer.direction import Direction

PAGE_BYTES = 4096
SCHEDULER = -1
"""The member that decides; workers are members 0, 1, ..."""

_WORD = 8
_SLOT_WORDS = 16
"""Two 64-byte cache lines for the scheduler and two for each worker, so that writers do not slow each other down."""

_CAME = 4
_FAILED = 5
_ANNOUNCED = {Direction.STORE: 0, Direction.LOAD: 2}
_FINISHED = {Direction.STORE: 1, Direction.LOAD: 3}


def control_words_bytes(num_workers: int) -> int:
    """The room that the words of *num_workers* take."""
    return (1 + num_workers) * _SLOT_WORDS * _WORD


class ControlPage:
    """The words, in the pool's shared memory. Made by ``Pool``; safe from any thread of any process.

    A worker that dies with a job leaves it unsettled for ever, and its rows out of use. No later process can be that
    worker of that pool, or its first job would settle the dead one's.
    """

    def __init__(self, memory: memoryview, num_workers: int) -> None:
        """*memory*: shared, writable, 64-byte aligned, of at least ``control_words_bytes(num_workers)``."""
        self.num_workers = num_workers
        self._words = memory[: control_words_bytes(num_workers)].cast("Q")
        self._taken: set[int] = set()
        self._taking = threading.Lock()
        self._fence_lock = threading.Lock()

    def has_come(self, member: int) -> bool:
        """Whether this pool has, or had, this member."""
        return self._words[self._index(member, _CAME)] != 0

    def note_member(self, member: int) -> None:
        """Say that this member has come. Its own side."""
        self._words[self._index(member, _CAME)] = 1

    def take_worker(self, worker: int) -> None:
        """Reserve this worker's words for one device, until ``leave_worker``. Worker side.

        Raises ``ValueError`` when another device of this process has them, or the worker is not one of this page's.
        """
        self._index(worker, 0)
        with self._taking:
            if worker in self._taken:
                raise ValueError(
                    f"worker {worker} of this pool has a device already: shut that down first, or give this one a "
                    "number of its own"
                )
            self._taken.add(worker)

    def leave_worker(self, worker: int) -> None:
        """No device uses this worker's words any more. Worker side."""
        with self._taking:
            self._taken.remove(worker)

    def is_settled(self, direction: Direction, job_id: int) -> bool:
        """Whether every worker has finished this job and all before it. Scheduler side."""
        if any(self.get_last_finished(worker, direction) < job_id for worker in range(self.num_workers)):
            return False
        self._fence()  # the next reader of the rows must see what the workers wrote before they said "finished"
        return True

    def note_failure(self, worker: int) -> None:
        """Say that this worker can't copy any more, before it reports the job that failed. Worker side."""
        self._words[self._index(worker, _FAILED)] = 1
        self._fence()

    @property
    def has_failed(self) -> bool:
        """Whether any worker can't copy any more. Scheduler side."""
        return any(self._words[self._index(worker, _FAILED)] for worker in range(self.num_workers))

    @property
    def is_idle(self) -> bool:
        """Whether every worker is done with every job that was handed to it by now. Any side."""
        return all(
            self.get_unfinished(worker, direction) is None
            for worker in range(self.num_workers)
            for direction in Direction
        )

    def announce(self, worker: int, direction: Direction, job_id: int) -> None:
        """Say that this worker was handed a job, before it touches a row. Worker side.

        Raises ``ValueError`` when the job id does not grow, or the worker is not one of this page's.
        """
        if job_id <= (last := self.get_last_announced(worker, direction)):
            raise ValueError(
                f"{direction.value} job {job_id} of worker {worker} is not above its last, {last}"
            )
        self._words[self._index(worker, _ANNOUNCED[direction])] = job_id
        self._fence()

    def finish(self, worker: int, direction: Direction, job_id: int) -> None:
        """Say that this worker will not touch the job's rows any more. Worker side, after the last byte."""
        assert job_id <= self.get_last_announced(worker, direction), "finish follows announce of the same job"
        self._fence()
        self._words[self._index(worker, _FINISHED[direction])] = job_id

    def get_last_announced(self, worker: int, direction: Direction) -> int:
        """The last job this worker was handed; 0 before the first."""
        return self._words[self._index(worker, _ANNOUNCED[direction])]

    def get_last_finished(self, worker: int, direction: Direction) -> int:
        """The last job this worker finished; 0 before the first."""
        return self._words[self._index(worker, _FINISHED[direction])]

    def get_unfinished(self, worker: int, direction: Direction) -> int | None:
        """The last job this worker was handed, if it has not finished it: it is under way, or the worker died."""
        finished = self.get_last_finished(worker, direction)
        announced = self.get_last_announced(worker, direction)
        return None if announced == finished else announced

    def release(self) -> None:
        """Let go of the shared memory; every other method raises ``ValueError`` afterwards. For the pool."""
        self._words.release()

    def _index(self, member: int, word: int) -> int:
        if not (0 <= member < self.num_workers or (member == SCHEDULER and word == _CAME)):
            raise ValueError(f"worker {member} is not one of this pool's {self.num_workers}")
        return (1 + member) * _SLOT_WORDS + word

    def _fence(self) -> None:
        """Keep all accesses before this point before all after it, as every process sees them (see above)."""
        with self._fence_lock:
            pass
        with self._fence_lock:
            pass
