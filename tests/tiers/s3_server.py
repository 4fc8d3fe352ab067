"""An S3 server on loopback for tests: moto's, in a thread, with faults to order.

As a program (``python s3_server.py PORT``) it serves until it is killed, and prints the port when it is ready.
"""

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)  # one line a request

KEY, SECRET = "test-key-id", "test-secret-value"

Answer = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class S3Server:
    """One running server. ``fault`` answers requests in place of the server, as long as it is set."""

    def __init__(self, port: int = 0) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        self._moto = self._server._server.app
        self._server._server.app = self._answer
        self.fault: Callable[[dict[str, Any]], Answer | None] | None = None
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self._changed = threading.Condition()  # guards the two below
        self._under_way = 0
        self.most_under_way = 0
        """The most requests that were under way together."""

    @property
    def options(self) -> dict[str, Any]:
        return options(self.port)

    def stop(self) -> None:
        self._server.stop()

    def client(self) -> Any:
        return client(self.port)

    def _answer(self, environ, start_response):
        with self._lock:
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        with self._changed:
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
            self._changed.notify_all()
        try:
            other = self.fault(environ) if self.fault is not None else None
            return (other or self._moto)(environ, start_response)
        finally:
            with self._changed:
                self._under_way -= 1

    def hold_until(self, requests: int) -> Callable[[dict[str, Any]], None]:
        """As ``fault``: keeps every request waiting until so many are under way together, or half a minute."""
        self.most_under_way = 0

        def fault(_environ: dict[str, Any]) -> None:
            with self._changed:
                self._changed.wait_for(lambda: self.most_under_way >= requests, 30.0)

        return fault


def options(port: int) -> dict[str, Any]:
    """Storage options that lead to a server."""
    return {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
    }


def client(port: int, **config: Any) -> Any:
    """An independent witness: looks into buckets, and damages what is there. *config* is botocore's."""
    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(**config),
    )


def refusal(status: str, code: str, message: str) -> Answer:
    """An answer as S3 gives it, such as ``refusal("403 Forbidden", "AccessDenied", "Access Denied")``."""

    def answer(environ, start_response):
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(status, [("Content-Type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]

    return answer


if __name__ == "__main__":
    server = S3Server(int(sys.argv[1]))
    print(server.port, flush=True)
    signal.pause()
