"""A Mooncake Store on loopback: a master, and a process that gives it memory. Both can be killed and started again."""

import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from kvtier_testing.driving import PATIENCE_S
from tests.tiers.ports import free_ports

_SEGMENT_BYTES = 64 << 20
_HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
for line in sys.stdin:
    name, _, content = line.rstrip().partition(" ")
    print(store.upsert(name, bytes.fromhex(content)) if name else min(store.remove_all(True), 0), flush=True)
store.close()
"""


def is_installed() -> bool:
    """Whether Mooncake's client and master are there."""
    return find_spec("mooncake") is not None


class MooncakeStore:
    """A master and a holder of memory, both running."""

    def __init__(self, place: Path, segment_bytes: int = _SEGMENT_BYTES) -> None:
        spec = find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        self._program = Path(next(iter(spec.submodule_search_locations)), "mooncake_master")
        self._place = place
        self._segment_bytes = segment_bytes
        self.port, self._metrics_port = free_ports(2)
        self.address = f"127.0.0.1:{self.port}"
        self.start_master()
        self.start_holder()

    def start_master(self) -> None:
        """Start it, empty."""
        with (self._place / "master.log").open("ab") as log:
            self.master = subprocess.Popen(
                [
                    str(self._program),
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={self.port}",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={self._metrics_port}",
                    "--client_ttl=3",
                ],
                stdout=log,
                stderr=log,
            )
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            except OSError:
                assert time.monotonic() < give_up, "mooncake_master does not answer"
                assert self.master.poll() is None, "mooncake_master ended"
                time.sleep(0.05)
            else:
                return

    def start_holder(self) -> None:
        """Start a process that gives memory to the store."""
        with (self._place / "holder.log").open("ab") as log:
            self.holder = subprocess.Popen(
                [sys.executable, "-c", _HOLDER, self.address, str(self._segment_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._hear()

    def _hear(self) -> None:
        assert self.holder.stdout.readline() == "0\n", "the holder of memory has failed"

    def _tell(self, line: str) -> None:
        self.holder.stdin.write(f"{line}\n")
        self.holder.stdin.flush()
        self._hear()

    def clear(self) -> None:
        """Remove every block."""
        self._tell("")

    def overwrite(self, name: str, content: bytes) -> None:
        """Put other bytes in the place of a block."""
        self._tell(f"{name} {content.hex()}")

    def end(self, process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
        """Kill one of the two."""
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()

    def stop(self) -> None:
        for process in (self.holder, self.master):
            if process.returncode is None:
                self.end(process)
