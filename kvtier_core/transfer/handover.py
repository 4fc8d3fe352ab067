"""How processes that start in any order come to share one memory that has no name.

Whoever comes first binds a socket of the engine's name, makes the memory, and hands its descriptor to all that ask;
when everybody has it, the socket goes. It is in Linux's abstract namespace: no file is left behind, whenever anybody
dies. Users are told apart by what the kernel says of the other end, never by what it sends.
"""

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

_CREDENTIALS = struct.Struct("@iII")  # pid, uid, gid
_RETRY_S = 0.005
_GUEST_TIMEOUT_S = 5.0
"""How long a guest that hangs may hold up the others."""
MAX_NOTE_BYTES = 1 << 16
"""What goes as one message whatever the machine's socket buffers are."""


class Host:
    """Hands a descriptor and a note to as many as are to come, on a thread of its own; then ends."""

    def __init__(self, listener: socket.socket, fd: int, count: int, note: bytes) -> None:
        """*listener* is bound and listening; *fd* stays the caller's and open until ``close`` has returned."""
        self._note = note
        self._listener = listener
        self._fd = fd
        self._count = count
        self._thread = threading.Thread(target=self._run, name="kvtier-handover", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End now. Twice is fine."""
        if self._thread.is_alive():
            try:
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            except OSError as error:
                if error.errno not in (errno.EBADF, errno.ENOTCONN):  # it has just ended by itself
                    raise
        self._thread.join()

    def _run(self) -> None:
        with self._listener:
            while self._count > 0:
                try:
                    guest, _ = self._listener.accept()
                except OSError:  # shut down
                    return
                with guest:
                    self._count -= self._serve(guest)

    def _serve(self, guest: socket.socket) -> bool:
        """Whether the guest has the descriptor. One that is gone, or another user's, does not."""
        if _peer_uid(guest) != os.getuid():
            return False
        guest.settimeout(_GUEST_TIMEOUT_S)
        try:
            socket.send_fds(guest, [b"\0" + self._note], [self._fd])
            return guest.recv(1) == b"\0"  # it has arrived
        except OSError:
            return False


class Met(NamedTuple):
    """What a meeting comes to: a descriptor, the note of whoever was first, and the host where this process is it."""

    fd: int
    note: bytes
    host: Host | None


def meet(
    name: str,
    make: Callable[[], int] | None,
    join: Callable[[int], None],
    others: int,
    timeout_s: float,
    note: bytes = b"",
) -> Met:
    """A descriptor of the memory that all who meet under *name* share; whoever is first makes it.

    *make* returns a new descriptor; ``None`` waits for somebody else to be first. *join* is given this process's own
    before anybody counts it as come: one that it refuses is still awaited. *others* is how many more will come, *note*
    is what the first one tells them. The host, where this process is it, must be closed before the descriptor. Raises
    ``TimeoutError`` when whoever was first does not answer, ``PermissionError`` when that is another user, and whatever
    *make* and *join* raise.
    """
    deadline = time.monotonic() + timeout_s
    address = f"\0kvtier-{os.getuid()}-{name}"
    while True:
        if make is not None and (listener := _claim(address)) is not None:
            fd, host = _host(listener, make, join, others, note)
            return Met(fd, note, host)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"the process that made the pool {name!r} did not hand it over within {timeout_s:g} s"
            )
        if (answer := _ask(address, name, join, left)) is not None:
            return Met(*answer, None)
        time.sleep(_RETRY_S)  # it is bound but does not listen yet, or is just closing


def _claim(address: str) -> socket.socket | None:
    """A socket bound to *address*; ``None`` when somebody else has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return listener


def _host(
    listener: socket.socket, make: Callable[[], int], join: Callable[[int], None], others: int, note: bytes
) -> tuple[int, Host]:
    try:
        fd = make()
        try:
            join(fd)
            listener.listen(others + 1)
            return fd, Host(listener, fd, others, note)
        except BaseException:
            os.close(fd)
            raise
    except BaseException:
        listener.close()
        raise


def _ask(address: str, name: str, join: Callable[[int], None], timeout_s: float) -> tuple[int, bytes] | None:
    """The descriptor, opened anew so that its locks are this process's own, and the note.

    ``None`` when the host is not ready or gone.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
        guest.settimeout(timeout_s)
        try:
            guest.connect(address)
            if (uid := _peer_uid(guest)) != os.getuid():
                raise PermissionError(f"the pool {name!r} was made by another user (uid {uid})")
            message, fds, _, _ = socket.recv_fds(guest, 1 + MAX_NOTE_BYTES, 1)
            if not fds:
                return None
            try:
                own = os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR | os.O_CLOEXEC)
            finally:
                os.close(fds[0])
        except (ConnectionError, TimeoutError, BlockingIOError):  # the last: too many ask at once
            return None
        try:
            join(own)
        except BaseException:
            os.close(own)
            raise
        with suppress(ConnectionError):  # a host that died since is missed by nobody
            guest.send(b"\0")
        return own, message[1:]


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
