"""A proxy on loopback between a tier and a real S3 server: passes requests on, and does wrong what a test asks for.

Signatures stay valid: the server sees the host that the client asked for.
"""

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


@dataclass(frozen=True)
class Request:
    """What the client asks for."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What the client gets: ``cut`` is how many bytes of the body come before the connection is reset."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: int | None = None


Forward = Callable[[Request], Answer]
Fault = Callable[[Request, Forward], Answer | None]
"""Answers a request in the server's place, or passes it on; ``None`` resets the connection without an answer."""


class FaultProxy:
    """Requests to ``port`` go to *server_port*, by way of ``fault`` where that is set."""

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.fault: Callable[[Request], Fault | None] | None = None
        """The fault of a request, if it has one."""
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self.requests: list[Request] = []
        """Those that came, without their bodies."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def note(self, request: Request) -> None:
        """A request came."""
        with self._lock:
            self.requests.append(replace(request, body=b""))

    def stop(self) -> None:
        """Serve no more; requests that are held up go on."""
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: clients that go away are what is tried here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: FaultProxy
    _upstream: http.client.HTTPConnection | None = None

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, self.path, dict(self.headers.items()), self.rfile.read(length))
        self.owner.note(request)
        fault = self.owner.fault(request) if self.owner.fault is not None else None
        answer = self._forward(request) if fault is None else fault(request, self._forward)
        if answer is None:
            self._reset()
            return
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if request.method == "HEAD":
            self.send_header("Content-Length", answer.headers.get("Content-Length", "0"))
        else:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if request.method != "HEAD":
            self.wfile.write(answer.body[: answer.cut])
        if answer.cut is not None:
            self.wfile.flush()
            self._reset()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815 - the base class's names

    def _forward(self, request: Request) -> Answer:
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection("127.0.0.1", self.owner.server_port, timeout=60)
        try:
            return self._exchange(self._upstream, request)
        except (http.client.HTTPException, OSError):
            self._upstream.close()
            self._upstream = None
            raise

    def _exchange(self, upstream: http.client.HTTPConnection, request: Request) -> Answer:
        upstream.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            if name.lower() not in ("connection", "expect"):
                upstream.putheader(name, value)
        upstream.endheaders(request.body or None)
        response = upstream.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        with contextlib.suppress(OSError):  # reset
            super().finish()

    def _reset(self) -> None:
        # Without lingering the peer gets a reset, not an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


# Faults.


def refuse(status: int, code: str, message: str, *, more: str = "") -> Fault:
    """An error as S3 gives it."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>".encode()

    def fault(_request: Request, _forward: Forward) -> Answer:
        return Answer(status, {"Content-Type": "application/xml"}, body)

    return fault


def hang_up(_request: Request, _forward: Forward) -> None:
    """The connection is reset, and nothing was done."""
    return


def lose_answer(request: Request, forward: Forward) -> None:
    """The server did what it was asked; then the connection is reset."""
    forward(request)


def cut_body(request: Request, forward: Forward) -> Answer:
    """The connection is reset in the middle of the body."""
    answer = forward(request)
    return replace(answer, cut=len(answer.body) // 2)


def shorten(request: Request, forward: Forward) -> Answer:
    """The body is short, and the headers say so."""
    answer = forward(request)
    return replace(answer, body=answer.body[:-1], headers=_without_sums(answer.headers))


def flip(request: Request, forward: Forward) -> Answer:
    """One byte in the middle of the body is another."""
    answer = forward(request)
    body = bytearray(answer.body)
    body[len(body) // 2] ^= 0x10
    return replace(answer, body=bytes(body), headers=_without_sums(answer.headers))


def delay(seconds: float, proxy: FaultProxy) -> Fault:
    """The server answers late."""

    def fault(request: Request, forward: Forward) -> Answer:
        proxy.stopped.wait(seconds)
        return forward(request)

    return fault


def _without_sums(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if not name.lower().startswith("x-amz-checksum")}
