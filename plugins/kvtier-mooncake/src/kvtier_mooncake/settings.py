"""What ``[tiers.NAME]`` with ``type = "mooncake"`` may say. The names are those of Mooncake's own configuration."""

import ipaddress
import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvtier_core.tier import Size, Threads, TierSettings

P2P = "P2PHANDSHAKE"
"""In place of a metadata server: the clients ask each other."""
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_LAST_PORT = 65535


def parse_address(text: str) -> tuple[str, int] | None:
    """Host and port of ``host:port`` or ``[address]:port``; ``None`` where it is neither."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= _LAST_PORT:
        return None
    host = match[1].strip("[]")
    try:
        host.encode("idna")
    except UnicodeError:  # a name whose parts are empty, or longer than 63 characters
        return None
    return host, int(match[2])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class MooncakeSettings(TierSettings):
    """The settings of one Mooncake tier."""

    master_server_address: str
    """Host and port of `mooncake_master`, such as `master.example:50051`."""
    metadata_server: str = P2P
    """URL of the metadata server, such as `http://master.example:8080/metadata`, or `P2PHANDSHAKE` for none."""
    local_hostname: str = "127.0.0.1"
    """Name or address by which other machines reach this one."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How blocks travel."""
    device_name: str = ""
    """RDMA devices, such as `mlx5_0,mlx5_1`."""
    global_segment_size: Size = 0
    """Memory that this process gives to the store; what lies in it ends with the process."""
    replica_num: Annotated[int, Field(ge=1, le=16)] = 1
    """Copies of each block, each on another segment."""
    preferred_segment: str = ""
    """Segment that blocks go to while it has room, as `host:port`."""
    with_soft_pin: bool = False
    """Whether blocks leave a full store after those that are not pinned."""
    threads: Threads = 1
    """Threads that call Mooncake's client: it has threads of its own, and more callers make loads slower."""

    @field_validator("master_server_address")
    @classmethod
    def _check_master(cls, address: str) -> str:
        if parse_address(address) is None:
            raise ValueError("must be host:port, such as master.example:50051")
        return address

    @field_validator("metadata_server")
    @classmethod
    def _check_metadata(cls, server: str) -> str:
        _, separator, rest = server.partition("://")
        if server != P2P and (not separator or parse_address(rest.partition("/")[0]) is None):
            raise ValueError(
                f"must be {P2P}, or a URL with a port, such as http://master.example:8080/metadata"
            )
        return server

    @model_validator(mode="after")
    def _check_reach(self) -> Self:
        own, _ = parse_address(self.local_hostname) or (self.local_hostname, 0)
        master, _ = self.servers["master_server_address"]
        if self.global_segment_size and _is_loopback(own) and not _is_loopback(master):
            raise ValueError(
                f"global_segment_size gives memory to other machines, and they would look for it at {own}, which is "
                "their own: set local_hostname to the name or address by which they reach this one"
            )
        return self

    @property
    def servers(self) -> dict[str, tuple[str, int]]:
        """Host and port of each server that must answer, by the setting that names it."""
        addresses = {"master_server_address": self.master_server_address}
        if self.metadata_server != P2P:
            addresses["metadata_server"] = self.metadata_server.partition("://")[2].partition("/")[0]
        found = {name: parse_address(text) for name, text in addresses.items()}
        return {name: address for name, address in found.items() if address is not None}
