"""The only module that names Mooncake: it connects, registers memory, moves blocks, and says what a code means.

Calls block, and may come from any thread. Nothing here decides when a call is made, or again.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_core import TierOpenError
from kvtier_mooncake.settings import MooncakeSettings
from kvtier_mooncake.work import Outcome

_LOCAL_BUFFER_BYTES = 16 << 20
"""The client's own buffer, which blocks that move from and to registered memory do not use."""
_CONNECT_S = 5.0
"""How long a server may take to accept a connection at the start."""
_TRIAL_S = 20.0
"""How long a trial may take, most of which a busy machine needs to start Python."""
_TRIAL = """
import os, sys
path, hostname, metadata, buffer, protocol, device, master = sys.argv[1:]
sys.path[:] = path.split(os.pathsep)
from mooncake.store import MooncakeDistributedStore
MooncakeDistributedStore().setup(hostname, metadata, 0, int(buffer), protocol, device, master)
os._exit(0)
"""
"""Sets a client up that gives no memory. What comes of that the real one will say."""

NOT_OURS: Outcome = "something of another size stands in the block's place"

_NO_ROOM = -200
_ABSENT = frozenset({-704, -703, -712})
"""Not found; being written by another; its copy is gone."""
_LARGER = -600
"""Of a read: the buffer is too small for what is there."""
_TRANSFER_FAILED = -800
_MEANINGS = {
    -601: "the master took this client for dead",
    -707: "the block's lease ran out while it was read: raise the master's --default_kv_lease_ttl",
    -900: "the master did not answer: see whether mooncake_master runs, and can be reached",
    -1010: "the master is not ready",
}


@dataclass(frozen=True)
class Region:
    """Memory that blocks are moved from and to."""

    address: int
    size: int


class Client:
    """A client of one store, connected."""

    def __init__(self, settings: MooncakeSettings, name: str, region: Region) -> None:
        """Connect and register *region*. Raises ``TierOpenError`` that says what to do."""
        where = f"tier {name!r} (kvtier-mooncake)"
        self._store, self._config = _set_up(settings, where, segment_bytes=0)
        if code := self._store.register_buffer(region.address, region.size):
            self._store.close()
            raise TierOpenError(
                f"{where}: {region.size} bytes of the pool could not be registered: {_meaning(code)}; over RDMA see "
                "the limit on locked memory (ulimit -l)"
            )

    def exist(self, names: Sequence[str]) -> list[Outcome]:
        """Whether each is there."""
        return [_meaning(code) if code < 0 else code == 1 for code in self._store.batch_is_exist(names)]

    def get(self, names: Sequence[str], addresses: Sequence[int], size: int) -> list[Outcome]:
        """Read each block, of *size* bytes, to its address. Something of another size is ``NOT_OURS``.

        Raises ``TimeoutError`` where bytes may still come. After ``close`` none will.
        """
        codes = self._store.batch_get_into(names, addresses, [size] * len(names))
        _check_over(codes)
        return [_loaded(code, size) for code in codes]

    def put(self, names: Sequence[str], addresses: Sequence[int], size: int) -> list[Outcome]:
        """Store each block, unless it is there. A store without room declines. Raises as ``get``."""
        return _stored(self._store.batch_put_from(names, addresses, [size] * len(names), self._config))

    def replace(self, names: Sequence[str], addresses: Sequence[int], size: int) -> list[Outcome]:
        """Store each block, also where it is there. Otherwise as ``put``."""
        return _stored(self._store.batch_upsert_from(names, addresses, [size] * len(names), self._config))

    def close(self) -> None:
        """End the client's threads and connections: after this it moves no byte.

        It gives no memory, so it asks the master for nothing: this takes a second, also where the master is stopped.
        """
        self._store.close()


class Segment:
    """Memory that this process gives to the store. Its client moves no block, so it never has to be given up."""

    def __init__(self, settings: MooncakeSettings, name: str) -> None:
        """Give it. Raises ``TierOpenError`` that says what to do."""
        where = f"tier {name!r} (kvtier-mooncake)"
        self._store, _ = _set_up(settings, where, settings.global_segment_size)

    def close(self) -> None:
        """Take it back: what lies in it is lost.

        The master is asked for something first. Mooncake waits for that without the interpreter's lock, and keeps the
        lock while it takes the memory back: with a master that is stopped, it would keep it until that goes on.
        """
        self._store.batch_is_exist(["kvtier"])
        self._store.close()


def _make(settings: MooncakeSettings, where: str) -> tuple[Any, Any]:
    """A client that is not set up, and how it is to store. Mooncake has no annotations."""
    try:
        from mooncake.store import (  # noqa: PLC0415 - its packages differ by accelerator: none can be required
            MooncakeDistributedStore,
            ReplicateConfig,
            SoftPinAction,
        )
    except ImportError as error:
        what_to_do = (
            "install the library that it names (libibverbs.so.1 is in Debian's package libibverbs1)"
            if ".so" in str(error)
            else "pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda where there is no CUDA "
            "(0.3.13 or newer)"
        )
        raise TierOpenError(f"{where}: Mooncake's client can't be imported: {error}; {what_to_do}") from None
    config = ReplicateConfig()
    config.replica_num = settings.replica_num
    config.soft_pin_action = SoftPinAction.ENABLE if settings.with_soft_pin else SoftPinAction.PRESERVE
    config.preferred_segments = [settings.preferred_segment] if settings.preferred_segment else []
    return MooncakeDistributedStore(), config


def _set_up(settings: MooncakeSettings, where: str, segment_bytes: int) -> tuple[Any, Any]:
    """A client that is connected and gives so much memory, and how it is to store. Raises ``TierOpenError``."""
    store, config = _make(settings, where)
    _check_servers(settings, where)
    _try_setup(settings, where)
    code = store.setup(
        settings.local_hostname,
        settings.metadata_server,
        segment_bytes,
        _LOCAL_BUFFER_BYTES,
        settings.protocol,
        settings.device_name,
        settings.master_server_address,
    )
    if code:
        raise TierOpenError(
            f"{where}: Mooncake's client could not be set up: {_meaning(code)}; its own log, on stderr, says more. "
            "Check master_server_address, metadata_server, protocol, device_name and local_hostname"
        )
    return store, config


def _check_servers(settings: MooncakeSettings, where: str) -> None:
    """Raises ``TierOpenError`` where no server is: Mooncake's client would try for minutes."""
    for setting, (host, port) in settings.servers.items():
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
        except OSError as error:
            raise TierOpenError(
                f"{where}: nothing answers at {host}:{port}: {error}; start it, or correct {setting}"
            ) from None


def _try_setup(settings: MooncakeSettings, where: str) -> None:
    """Raises ``TierOpenError`` where the master accepts connections and says nothing.

    In a process of its own: Mooncake's ``setup`` keeps the interpreter's lock until the master has answered.
    """
    arguments = (
        os.pathsep.join(sys.path),
        settings.local_hostname,
        settings.metadata_server,
        str(_LOCAL_BUFFER_BYTES),
        settings.protocol,
        settings.device_name,
        settings.master_server_address,
    )
    try:
        ended = subprocess.run(
            (sys.executable, "-c", _TRIAL, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TierOpenError(
            f"{where}: what listens at {settings.master_server_address} has not answered as a Mooncake master does "
            f"for {_TRIAL_S:g} s; see whether mooncake_master runs there, and is not stopped"
        ) from None
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise TierOpenError(
            f"{where}: Mooncake's client ended when it was set up for a trial (status {ended.returncode}): {said}"
        )


def _loaded(code: int, size: int) -> Outcome:
    if code == _LARGER or 0 <= code != size:
        return NOT_OURS
    return True if code >= 0 else False if code in _ABSENT else _meaning(code)


def _stored(codes: Sequence[int]) -> list[Outcome]:
    _check_over(codes)
    return [True if code >= 0 else False if code == _NO_ROOM else _meaning(code) for code in codes]


def _check_over(codes: Sequence[int]) -> None:
    """Raises ``TimeoutError`` where a transfer failed: some of its pieces may move on.

    Mooncake fails a transfer after 60 s, or as soon as it can't tell how one of its pieces stands.
    """
    if failed := codes.count(_TRANSFER_FAILED):
        raise TimeoutError(
            f"{failed} of {len(codes)} transfers failed, or were given up: see whether the process that holds the "
            f"blocks still runs, is stopped, or cut off (Mooncake's code {_TRANSFER_FAILED})"
        )


def _meaning(code: int) -> str:
    return f"{_MEANINGS.get(code, 'its documentation says what this is')} (Mooncake's code {code})"
