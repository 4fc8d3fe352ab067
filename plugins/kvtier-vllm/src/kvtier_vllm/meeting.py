"""Where the processes of one engine meet: the first worker makes the pool and hands it to the others.

vLLM starts the workers before the scheduler and tells none of them about the others, but all know the engine's id.
The first worker to claim the name made of it is the host: it makes the pool and passes its descriptor, with the facts
about the engine, to the other workers and to the scheduler, each once. The name is an abstract socket address: it is
in no directory, and gone when the host dies or when all have come. The memory has no name at all; it is freed with the
last process that has it.

It decides who may have the pool: processes of the same user on this host, one a role, with the same facts.
"""

import hashlib
import json
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvtier_core import PoolError
from kvtier_core.transfer import Pool, PoolGeometry

SCHEDULER = "scheduler"
_POLL_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def worker_role(rank: int) -> str:
    """What worker *rank* is called at the meeting."""
    return f"worker {rank}"


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What a process takes home: its own view of the pool, and the facts of the engine."""

    pool: Pool
    facts: bytes


def _address(engine_id: str) -> str:
    name = hashlib.sha256(f"{os.getuid()} {engine_id}".encode()).hexdigest()[:40]
    return f"\0kvtier-{name}"


def _send(connection: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(connection, [struct.pack(">I", len(data))], fds or [])
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, fds, _, _ = socket.recv_fds(connection, 4, 1)
    try:
        while len(head) < 4:  # noqa: PLR2004 - the length's four bytes
            head += _some(connection, 4 - len(head))
        (length,) = struct.unpack(">I", head)
        data = b""
        while len(data) < length:
            data += _some(connection, length - len(data))
        message: dict[str, Any] = json.loads(data)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds


def _some(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count)
    if not data:
        raise ConnectionError("the other side hung up")
    return data


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end: an abstract address has no permissions."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())


def meet_as_worker(
    engine_id: str, rank: int, geometry: PoolGeometry, facts: bytes, timeout_s: float
) -> Admission:
    """Make the pool, or get it from the worker that did.

    Raises ``PoolError``: it does not fit, another worker has other facts, the host did not answer within *timeout_s*,
    or two engines use one id.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(_address(engine_id))
    except OSError:
        claim.close()
        return _visit(engine_id, worker_role(rank), timeout_s, facts)
    try:
        claim.listen(geometry.num_workers + 1)
        pool = Pool.create(geometry)
    except BaseException as error:
        claim.close()
        if isinstance(error, MemoryError):
            raise PoolError(str(error)) from None
        raise
    roles = {worker_role(other) for other in range(geometry.num_workers)} - {worker_role(rank)}
    # The host's own mapping may be closed before all have come: the descriptor handed out is a copy.
    fd = os.dup(pool.fd)
    host = _Host(claim, fd, facts, {*roles, SCHEDULER}, timeout_s)
    threading.Thread(target=host.serve, name="kvtier-meeting", daemon=True).start()
    return Admission(pool=pool, facts=facts)


def meet_as_scheduler(engine_id: str, timeout_s: float) -> Admission:
    """Get the pool from the worker that made it. Raises ``PoolError`` as ``meet_as_worker`` does."""
    return _visit(engine_id, SCHEDULER, timeout_s, None)


class _Host:
    """Serves one meeting, on a thread of its own, until every role has come or the time is up."""

    def __init__(
        self, claim: socket.socket, fd: int, facts: bytes, roles: set[str], timeout_s: float
    ) -> None:
        self._claim = claim
        self._fd = fd
        self._facts = facts
        self._expected = roles
        self._deadline = time.monotonic() + timeout_s

    def serve(self) -> None:
        try:
            while self._expected and (left := self._deadline - time.monotonic()) > 0:
                self._claim.settimeout(left)
                # A visitor that hangs up or sends nonsense costs nobody else anything.
                with suppress(OSError, ValueError, KeyError):
                    self._admit_one()
        finally:
            self._claim.close()
            os.close(self._fd)

    def _admit_one(self) -> None:
        connection, _ = self._claim.accept()
        with connection:
            connection.settimeout(5.0)
            if not _is_ours(connection):
                return
            request, _ = _receive(connection)
            refusal = self._refusal(request["role"], request["facts"])
            if refusal is not None:
                _send(connection, {"refusal": refusal})
                return
            _send(connection, {"facts": self._facts.decode()}, [self._fd])
            self._expected.discard(request["role"])

    def _refusal(self, role: str, facts: str | None) -> str | None:
        if role not in self._expected:
            return f"{role} is here already: do two engines use one kv_transfer_config.engine_id?"
        if facts is not None and facts.encode() != self._facts:
            return f"{role} has other facts about the engine than the worker that made the pool"
        return None


def _visit(engine_id: str, role: str, timeout_s: float, facts: bytes | None) -> Admission:
    deadline = time.monotonic() + timeout_s
    with _connect(engine_id, role, deadline) as connection:
        connection.settimeout(max(_POLL_S, deadline - time.monotonic()))
        try:
            _send(connection, {"role": role, "facts": None if facts is None else facts.decode()})
            answer, fds = _receive(connection)
        except (OSError, ValueError) as error:
            raise PoolError(f"{role}: the worker that has kvtier's pool did not answer: {error}") from error
    if "refusal" in answer or len(fds) != 1:
        raise PoolError(f"kvtier's pool was refused: {answer.get('refusal', 'no descriptor came')}")
    try:
        pool = Pool.attach(f"/proc/self/fd/{fds[0]}")
    finally:
        os.close(fds[0])
    return Admission(pool=pool, facts=answer["facts"].encode())


def _connect(engine_id: str, role: str, deadline: float) -> socket.socket:
    pause = threading.Event()
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(_address(engine_id))
            if _is_ours(connection):
                return connection
        except OSError:
            pass
        connection.close()
        if time.monotonic() >= deadline:
            raise PoolError(
                f"{role}: no worker of this engine offered kvtier's pool in time. Workers on other hosts, or in "
                "other network namespaces than the scheduler, are not supported"
            )
        pause.wait(_POLL_S)
