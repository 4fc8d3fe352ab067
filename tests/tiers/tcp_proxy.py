"""A proxy on loopback between a tier and its server: passes bytes on, late, changed, cut off, or not at all."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

Change = Callable[[bytes], bytes | None]
"""Takes what the server sent; gives what arrives, or ``None`` to end the connection."""


class TcpProxy:
    """Use it as a context manager. ``port`` leads to the port of a server on loopback."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.delay_s = 0.0
        """How much later each piece that a side sent arrives at the other."""
        self.change: Change | None = None
        """What happens to what the server sends."""
        self._passes = threading.Event()
        self._passes.set()
        self._lock = threading.Lock()  # guards the two below
        self._sockets: list[socket.socket] = []
        self._is_cut = False
        self._forgotten: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._passes.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for connections
        self._listener.close()
        self.cut()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End every connection, and those to come at once."""
        with self._lock:
            self._is_cut = True
            sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let new connections through."""
        with self._lock:
            self._is_cut = False

    def forget(self) -> None:
        """Lose whatever comes on the connections there are, and end none, as a firewall does. New ones are served."""
        with self._lock:
            self._forgotten = list(self._sockets)

    @property
    def connections(self) -> int:
        """How many were made and not cut."""
        with self._lock:
            return len(self._sockets) // 2

    def hold(self) -> None:
        """Let nothing pass until ``release``: the network has lost the server."""
        self._passes.clear()

    def release(self) -> None:
        self._passes.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._to_port))
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                is_cut = self._is_cut
                self._sockets += [] if is_cut else [client, server]
            if is_cut:
                client.close()
                server.close()
                continue
            ends = (threading.Semaphore(1), client, server)
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(source, target, ends), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, ends: tuple) -> None:
        first, client, server = ends
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self.delay_s)
                self._passes.wait()
                if source in self._forgotten:
                    continue
                change = self.change if source is server else None
                passed = data if change is None else change(data)
                if passed is None:
                    break
                target.sendall(passed)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if not first.acquire(blocking=False):  # the other direction has ended before
            client.close()
            server.close()
