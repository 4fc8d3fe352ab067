"""How processes that start in any order, or start again, come to share one memory that has no name.

The first one binds a socket of the engine's name, makes the memory, and hands out the memory's descriptor together with
the socket. Every member answers on that socket as long as it lives, so a newcomer finds the pool as long as anybody has
it, and the name goes with the last one. The socket is in Linux's abstract namespace: no file is left behind, whenever
anybody dies. The kernel tells users apart, never what the other end sends.
"""

import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from kvtier_core.transfer.forks import own
from kvtier_core.transfer.socket_owner import uid_of_bound

_CREDENTIALS = struct.Struct("@iII")  # pid, uid, gid
_TWO_FDS = struct.Struct("@ii")
_KIND = socket.SOCK_SEQPACKET
_RETRY_S = 0.005
_LOOK_S = 1.0
"""Between two looks at whose socket it is that does not answer."""
_ANSWER_TIMEOUT_S = 5.0
"""How long a member that hangs may keep a newcomer from asking the others."""
_BACKLOG = 1024
_TROUBLE_PAUSE_MS = 100
MAX_NOTE_BYTES = 1 << 16
"""What goes as one message whatever the machine's socket buffers are."""

_log = logging.getLogger("kvtier.pool")


class Host:
    """Hands a descriptor and a note to all that come, on a thread of its own, until ``close``.

    A forked child has a copy of the socket, which is closed there.
    """

    def __init__(self, listener: socket.socket, fd: int, note: bytes) -> None:
        """*listener* is bound and listening, maybe in other processes too; *fd* stays the caller's."""
        self._note = note
        self._listener = listener
        self._listener.setblocking(False)  # other members may be quicker to accept
        self._fd = fd
        self._last: Callable[[], None] | None = None
        self._end: int | None = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(
            target=self._run, args=(self._end,), name="kvtier-handover", daemon=True
        )
        try:
            self._thread.start()
        except BaseException:  # no more threads for this user, or in this control group
            os.close(self._end)
            raise

    def close(self) -> None:
        """End now. Twice is fine."""
        self._tell_to_end()
        self._thread.join()
        self._let_go()

    def end_soon(self, last: Callable[[], None]) -> None:
        """End without waiting for it, which a finalizer must not; *last* is called when nobody is answered any more."""
        self._last = last
        if not self._tell_to_end():
            self._let_go()
            last()

    def _tell_to_end(self) -> bool:
        """Whether the thread is there to be told."""
        if not self._thread.is_alive() or self._end is None:
            return False
        os.eventfd_write(self._end, 1)
        return True

    def _let_go(self) -> None:
        if self._end is not None:
            os.close(self._end)
            self._end = None
        self._listener.close()

    def _run(self, end: int) -> None:
        self._answer_all(end)
        if self._last is not None:
            self._let_go()
            self._last()

    def _answer_all(self, end: int) -> None:
        both, only_end = select.poll(), select.poll()
        both.register(self._listener, select.POLLIN)
        for waiting in (both, only_end):
            waiting.register(end, select.POLLIN)
        while end not in {fd for fd, _ in both.poll()}:
            try:
                guest, _ = self._listener.accept()
            except BlockingIOError:  # another member was quicker
                continue
            except OSError as error:
                _log.warning("a process that wants to share the pool has to wait: %s", error)
                only_end.poll(_TROUBLE_PAUSE_MS)
                continue
            with guest:
                self._serve(guest)

    def _serve(self, guest: socket.socket) -> None:
        """Give it all, unless it is another user's. One that is gone does not matter."""
        if _peer_uid(guest) != os.geteuid():
            return
        guest.settimeout(_ANSWER_TIMEOUT_S)
        try:
            socket.send_fds(guest, [b"\0" + self._note], [self._fd, self._listener.fileno()])
        except OSError as error:
            _log.debug("a process that wanted to share the pool is gone: %s", error)


class Met(NamedTuple):
    """What a meeting comes to: a descriptor, the note of whoever was first, and what answers later ones."""

    fd: int
    note: bytes
    host: Host


def meet(
    name: str,
    make: Callable[[], int] | None,
    join: Callable[[int], None],
    timeout_s: float,
    note: bytes = b"",
) -> Met:
    """A descriptor of the memory that all who meet under *name* share; whoever is first makes it.

    *make* returns a new descriptor; ``None`` waits for somebody else to be first. *join* is called with the descriptor
    before anybody else can be handed it by this process. *note* is what the first one tells all. The host must be
    closed before the descriptor. Raises ``TimeoutError`` when nobody makes it, or those who have it do not answer,
    ``PermissionError`` at once when another user has the name, and whatever *make* and *join* raise.
    """
    next_look = time.monotonic()
    deadline = next_look + timeout_s
    address = f"\0kvtier-{os.geteuid()}-{name}"
    while True:
        if make is not None and (listener := _claim(address)) is not None:
            try:
                fd = make()
            except BaseException:
                listener.close()
                raise
            return _take_part(listener, fd, join, note)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(_why_nobody_answered(address, name, timeout_s))
        if (met := _ask(address, name, join, min(left, _ANSWER_TIMEOUT_S))) is not None:
            return met
        if time.monotonic() >= next_look:
            _check_user(name, uid_of_bound(address.encode(), _KIND))
            next_look = time.monotonic() + _LOOK_S
        time.sleep(_RETRY_S)  # it is bound but does not listen yet, or is just closing


def _claim(address: str) -> socket.socket | None:
    """A socket bound to *address*; ``None`` when somebody else has it."""

    def bind() -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, _KIND)
        try:
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
        return listener

    try:
        return own(bind)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _why_nobody_answered(address: str, name: str, timeout_s: float) -> str:
    if (listener := _claim(address)) is not None:
        listener.close()
        return (
            f"nobody made the pool {name!r} within {timeout_s:g} s: the process that is to make it did not start, or "
            "runs on another machine or in another network namespace"
        )
    uid = uid_of_bound(address.encode(), _KIND)
    _check_user(name, uid)
    others = "" if uid is not None else ", or give the pool another name if they are another user's"
    return (
        f"those who have the pool {name!r} did not hand it over within {timeout_s:g} s: they are stopped, or hang, or "
        f"died and left a child behind that holds the name. End them{others}"
    )


def _check_user(name: str, uid: int | None) -> None:
    """Raises ``PermissionError`` when the pool's name is known to be another user's."""
    if uid not in (None, os.geteuid()):
        raise PermissionError(
            f"the name of the pool {name!r} is held by another user (uid {uid}): give the pool another name, in vLLM "
            "by another engine_id, or have that user's process ended",
        )


def _take_part(listener: socket.socket, fd: int, join: Callable[[int], None], note: bytes) -> Met:
    """Join, and answer others from then on. Both descriptors are closed where that fails."""
    with ExitStack() as on_failure:
        on_failure.callback(listener.close)
        on_failure.callback(os.close, fd)
        join(fd)
        listener.listen(_BACKLOG)  # which changes nothing where others listen already
        met = Met(fd, note, Host(listener, fd, note))
        on_failure.pop_all()
        return met


def _ask(address: str, name: str, join: Callable[[int], None], timeout_s: float) -> Met | None:
    """What a member hands over; ``None`` when nobody is ready to."""
    with socket.socket(socket.AF_UNIX, _KIND) as guest:
        guest.settimeout(timeout_s)
        try:
            guest.connect(address)
            _check_user(name, _peer_uid(guest))
            if not guest.recv(1, socket.MSG_PEEK):
                return None
            message, fd, listener = _receive(guest)
        except (ConnectionError, TimeoutError, BlockingIOError):  # the last: too many ask at once
            return None
        return _take_part(listener, fd, join, message[1:])


def _receive(guest: socket.socket) -> tuple[bytes, int, socket.socket]:
    """The message that has come: what it says, the memory's descriptor, and the socket that all answer on."""
    received: list[tuple[bytes, int]] = []

    def take() -> socket.socket:
        # Not recv_fds, which ignores its flags in Python 3.11: whatever program is started would have the descriptors.
        message, ancillary, _, _ = guest.recvmsg(
            1 + MAX_NOTE_BYTES, socket.CMSG_LEN(_TWO_FDS.size), socket.MSG_CMSG_CLOEXEC
        )
        fds = array("i", b"".join(data for _, _, data in ancillary))
        if len(fds) < 2:  # noqa: PLR2004 - the memory and the socket
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, "this process may open no more files, and a pool takes five")
        received.append((message, fds[0]))
        return socket.socket(fileno=fds[1])

    listener = own(take)
    return *received[0], listener


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
