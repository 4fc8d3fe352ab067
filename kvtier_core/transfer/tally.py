"""When a job that every worker carries out is done (C43): pure, fed with what the workers say on the control page.

Decides whether a block counts as stored: only when every worker has moved its part. Any doubt is a failure, which costs
a hit and nothing else.
"""

from collections.abc import Iterator

from kvtier_core.transfer.control import Progress


class JobTally:
    """The unfinished jobs of one direction, over all workers. Job ids grow. Scheduler side, one thread.

    A worker tells only the last job that failed. A job below that, of which nothing was heard while it was the last,
    may have failed, too, and counts as failed: ask often enough, and it hardly ever comes to that. A worker that starts
    again tells the same of what its predecessor was handed and did not begin; what that died in is never done.
    """

    def __init__(self, num_workers: int) -> None:
        self._waiting: dict[int, set[int]] = {}
        """Each job's workers that have not finished it, in order of job."""
        self._doubtful: set[int] = set()
        self._num_workers = num_workers

    def add(self, job_id: int) -> None:
        """This job was handed to all workers."""
        assert not self._waiting or job_id > next(reversed(self._waiting)), "job ids grow"
        self._waiting[job_id] = set(range(self._num_workers))

    def report(self, worker: int, progress: Progress) -> None:
        """Take in how far a worker is. Cost: proportional to the jobs that wait for it."""
        for job_id, workers in self._waiting.items():
            if job_id > progress.finished:
                return
            if worker in workers:
                workers.discard(worker)
                if job_id <= progress.failed:
                    self._doubtful.add(job_id)

    def discard(self, job_id: int) -> None:
        """Forget a job: nobody waits for it any more, as after a reset or the death of a worker."""
        self._waiting.pop(job_id, None)
        self._doubtful.discard(job_id)

    def take_done(self) -> Iterator[tuple[int, bool]]:
        """The jobs that every worker has finished, in order, each once, and whether all moved their bytes."""
        done = [job_id for job_id, workers in self._waiting.items() if not workers]
        for job_id in done:
            ok = job_id not in self._doubtful
            self.discard(job_id)
            yield job_id, ok

    @property
    def waiting(self) -> list[int]:
        """Jobs that some worker has not finished."""
        return [job_id for job_id, workers in self._waiting.items() if workers]
