"""Speaks TLS on loopback for a server that does not: with a certificate that it made itself."""

import contextlib
import datetime as dt
import select
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class TlsProxy:
    """Use it as a context manager. ``certificate`` is the file that a client has to trust.

    It is for the host *name*, and valid for *hours*, from the first to the second from now on. It is signed by itself,
    or by an authority of which nothing else is known. It is shown *pause_s* after a client has connected.
    """

    def __init__(
        self,
        to_port: int,
        directory: Path,
        *,
        name: str = "localhost",
        hours: tuple[float, float] = (-1, 24),
        has_authority: bool = False,
        pause_s: float = 0.0,
    ) -> None:
        self._to_port = to_port
        self._pause_s = pause_s
        self.certificate = directory / "server.pem"
        key = directory / "server.key"
        _make_certificate(self.certificate, key, name, hours, has_authority=has_authority)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        time.sleep(self._pause_s)
        with (
            contextlib.suppress(OSError),
            plain,
            socket.create_connection(("127.0.0.1", self._to_port)) as server,
            self._context.wrap_socket(plain, server_side=True) as client,
        ):
            client.setblocking(False)  # one thread for both ways: an SSL socket is not for two at once
            _pass_on(client, server)


def _pass_on(client: ssl.SSLSocket, server: socket.socket) -> None:
    while True:
        readable, _, _ = select.select([client, server], [], [])
        if client in readable or client.pending():
            with contextlib.suppress(ssl.SSLWantReadError):
                while data := client.recv(1 << 16):
                    server.sendall(data)
                return
        if server in readable:
            data = server.recv(1 << 16)
            if not data:
                return
            client.setblocking(True)
            client.sendall(data)
            client.setblocking(False)


def _make_certificate(
    certificate: Path, key_file: Path, name: str, hours: tuple[float, float], *, has_authority: bool
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    signer = ec.generate_private_key(ec.SECP256R1()) if has_authority else key
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(_called(name))
        .issuer_name(_called("authority" if has_authority else name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + dt.timedelta(hours=hours[0]))
        .not_valid_after(now + dt.timedelta(hours=hours[1]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=not has_authority, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
