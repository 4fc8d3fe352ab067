"""Whose a socket in Linux's abstract namespace is, which a connection tells only where somebody listens.

Decides nothing. Asks the kernel as ``ss --unix`` does, by NETLINK_SOCK_DIAG (sock_diag(7)), which every user may.
"""

import socket
import struct
from collections.abc import Iterator

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY = 20
_DUMP_REQUEST = 0x301
_LAST_TYPES = (2, 3)
"""An error, and the end of the list."""
_WITHOUT_CONNECTIONS = 1 << 7 | 1 << 10
"""Bound, and listening: what is accepted has the listener's name and the guest's owner."""
_NAME_AND_UID = 0x01 | 0x40
_NAME, _UID = 0, 7

_MESSAGE = struct.Struct("=IHHII")  # length, type, flags, number, port
_REQUEST = struct.Struct("=BBHIIIII")  # family, protocol, padding, states, inode, show, cookie
_SOCKET = struct.Struct("=BBBBIII")  # family, type, state, padding, inode, cookie
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_NUMBER = struct.Struct("=I")
_BUFFER_BYTES = 1 << 16
_TIMEOUT_S = 1.0


def uid_of_bound(address: bytes, kind: socket.SocketKind) -> int | None:
    """The user whose socket of *kind* has the abstract *address*, zero byte included.

    ``None`` when there is none, or the kernel does not say: before Linux 5.3, or where such questions are forbidden.
    Any thread. Blocks about a millisecond for a thousand sockets, at most a second for each answer.
    """
    try:
        for kind_found, attributes in _sockets():
            if kind_found == kind and attributes.get(_NAME) == address and _UID in attributes:
                return int(_NUMBER.unpack(attributes[_UID])[0])
    except (OSError, struct.error):
        return None
    return None


def _sockets() -> Iterator[tuple[int, dict[int, bytes]]]:
    """The kind and the attributes of every Unix socket that is no connection."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _WITHOUT_CONNECTIONS, 0, _NAME_AND_UID, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(request), _BY_FAMILY, _DUMP_REQUEST, 1, 0) + request)
        while True:
            for kind, body in _parts(kernel.recv(_BUFFER_BYTES), _MESSAGE):
                if kind in _LAST_TYPES:
                    return
                yield _SOCKET.unpack_from(body)[1], dict(_parts(body[_SOCKET.size :], _ATTRIBUTE))


def _parts(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """The type and the contents of each part; every one begins with its length, and at a multiple of 4 bytes."""
    while len(data) >= header.size:
        length, kind, *_ = header.unpack_from(data)
        if length < header.size:
            raise struct.error("a part is shorter than its header")
        yield kind, data[header.size : length]
        data = data[-(-length // 4) * 4 :]
