"""Ports on loopback for servers that tests start."""

import contextlib
import random
import socket

_QUIET_PORTS = range(15000, 32000)
"""Below those that the kernel gives to connections."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that no connection gets by itself before the server listens there."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(_QUIET_PORTS, len(_QUIET_PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"fewer than {count} ports are free")
