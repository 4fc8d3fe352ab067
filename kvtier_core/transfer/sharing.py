"""One process's part in a pool that several share: from its joining, over all having come, to its leaving.

Decides whether a process may be the member that another was before it, and when a named pool loses its name.
"""

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from kvtier_core.transfer.control import ControlPage
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.handover import Host
from kvtier_core.transfer.members import SCHEDULER, Members, describe, wait_for
from kvtier_core.transfer.region import is_at, unlink_if_dead

_CLOSE_TIMEOUT_S = 1.0
"""For others who look at the name at the same moment, which takes them microseconds."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How this process shares a pool with others: by a *host*, or by a file's name, its *path*."""

    members: Members
    host: Host | None = None
    path: Path | None = None

    def begin(self, control: ControlPage, member: int, name: str) -> None:
        """Be *member*, who holds its lock, unless what the dead left can't be taken over.

        Raises ``OSError`` of ``EOWNERDEAD``: the scheduler came and is gone, while workers may still fill rows that
        only it knew of; or this worker died in the middle of a job, which its successor's first would settle.
        """
        if (wrong := self._what_the_dead_left(control, member)) is not None:
            living = ", ".join(map(describe, self.members.present())) or "nobody"
            raise OSError(
                errno.EOWNERDEAD,
                f"the pool {name!r} can't be joined again: {wrong}. End the processes that have it ({living}) and "
                "start the whole engine anew",
            )
        if member == SCHEDULER:
            control.note_scheduler()
        else:
            control.note_worker(member)

    def _what_the_dead_left(self, control: ControlPage, member: int) -> str | None:
        if control.scheduler_came and (member == SCHEDULER or SCHEDULER in self.members.missing()):
            return "its scheduler is gone, and what that knew of its rows"
        if member != SCHEDULER:
            for direction in Direction:
                if (job := control.get_unfinished(member, direction)) is not None:
                    return f"{describe(member)} died in the middle of {direction.value} job {job}"
        return None

    def wait_for_all(self, control: ControlPage, fd: int, timeout_s: float) -> None:
        """Wait for all members; then nothing names the open file *fd* any more. Raises ``TimeoutError``."""
        deadline = time.monotonic() + timeout_s
        if not wait_for(lambda: not self.members.missing(), timeout_s):
            raise TimeoutError(self._why_not_all(control, timeout_s))
        if self.path is not None and self.members.enter_gate(max(0.0, deadline - time.monotonic())):
            try:  # else somebody else is about to
                if is_at(fd, self.path):
                    self.path.unlink()
            finally:
                self.members.leave_gate()

    def _why_not_all(self, control: ControlPage, timeout_s: float) -> str:
        missing = self.members.missing()
        left = [m for m in missing if (control.scheduler_came if m == SCHEDULER else control.worker_came(m))]
        texts = []
        if left:
            texts.append(
                f"{', '.join(map(describe, left))} joined the pool and left it again: see in its own output why "
                "it ended"
            )
        if never := [member for member in missing if member not in left]:
            late = (
                "" if self.path is None else ", and see each other in /proc to start again once all have come"
            )
            texts.append(
                f"{', '.join(map(describe, never))} did not join the pool within {timeout_s:g} s: all processes of an "
                f"engine must run on this machine, in one network namespace, as one user, with one configuration{late}"
            )
        return "; ".join(texts)

    def end(self, fd: int) -> None:
        """Leave the pool. In a forked child, which was never in it, the parent and the file's name stay as they are."""
        if self.host is not None:
            self.host.close()
        self._leave(fd)

    def abandon(self, fd: int) -> None:
        """Leave the pool and close *fd*, without waiting for what answers others: nobody uses the memory any more."""

        def leave() -> None:
            self._leave(fd)
            os.close(fd)

        if self.host is None:
            leave()
        else:
            self.host.end_soon(leave)

    def _leave(self, fd: int) -> None:
        if self.path is not None and not self.members.is_closed:
            unlink_if_dead(fd, self.path, self.members, timeout_s=_CLOSE_TIMEOUT_S)
        self.members.close()
