"""What a refusal or a lost connection means: try again, give up, or full; and what to do about it.

Decides by the server's codes alone; no I/O. No text holds a secret, though a server may repeat a login: secrets are
taken out of the whole line, before it is cut or cleaned.
"""

import ssl
from collections.abc import Collection, Mapping
from typing import TypeVar

from kvtier_core.tier import mask_text

_T = TypeVar("_T")

_PASSING = (
    "BUSY ", "CLUSTERDOWN ", "ERR max number of clients", "LOADING ", "MASTERDOWN ", "NOREPLICAS ", "READONLY ",
    "TRYAGAIN ", "UNBLOCKED ",
)  # fmt: skip
"""Beginnings of refusals that end by themselves, or with another connection: behind one name the primary may change."""
_REPEATED = ", with args beginning with"
"""Behind this a server repeats what it was sent: of AUTH, user and password."""
_CLUSTER = "clusters are not followed: use a server of its own, or a proxy before the cluster"
_LOGIN = "check username and password"
_ADVICE = {
    "ASK ": _CLUSTER,
    "DENIED ": "the server is in protected mode: give it a user or requirepass, and set password",
    "ERR AUTH ": "the server has no password: unset username and password, or give it one",
    "ERR DB index": "url names a database that the server does not have: see its setting databases",
    "ERR invalid DB index": "url names a database that the server does not have: see its setting databases",
    "ERR max number of clients": "raise the server's maxclients, or lower threads",
    "ERR unknown command": "is it a Valkey or Redis server, 6.0 or newer?",
    "ERR wrong number of arguments for 'auth'": "a server before 6.0 has no users: unset username",
    "LOADING ": "it reads its data: wait; at the start limits.open_retry does",
    "MISCONF ": 'the server can\'t save to its disk and takes no stores meanwhile: see its log, or set save to ""',
    "MOVED ": _CLUSTER,
    "NOAUTH ": _LOGIN,
    "NOPERM ": "the user has to be allowed INFO and SCAN, GET, SET, STRLEN and UNLINK on keys that begin with prefix, "
    "and SELECT where url names a database",
    "READONLY ": "it is a replica: give url a name that leads to the primary",
    "WRONGPASS ": _LOGIN,
    "WRONGTYPE ": "another program uses this name: set another prefix",
}
"""What to do, by the beginning of a refusal."""
_UNKNOWN_AUTHORITY = "name the file of the authority that signed it: ssl_ca_certs=FILE in url"
_OTHER_NAME = (
    "write the host in url as the certificate has it, or leave its name unchecked: ssl_check_hostname=false"
)
_CERTIFICATE_ADVICE = {
    9: "it is too early for it: see the clocks of both machines",
    10: "renew it",
    18: _UNKNOWN_AUTHORITY,
    19: _UNKNOWN_AUTHORITY,
    20: _UNKNOWN_AUTHORITY,
    21: _UNKNOWN_AUTHORITY,
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}
"""What to do, by OpenSSL's number of what is wrong with a certificate."""


class ServerLostError(ConnectionError):
    """The connection ended, or the server is busy with itself: the same call may well succeed in a moment."""


class ServerBusyError(ServerLostError):
    """The server said that it can't do what it is asked now."""


class ServerConfusedError(ServerLostError):
    """A reply answers no question: those before it may have answered others than were thought."""


class ServerSilentError(OSError):
    """The server did not answer in time: the same call would wait as long again."""


class ServerRefusedError(OSError):
    """The server does not do what it is asked, and would not the next time."""


class ServerFullError(ServerRefusedError):
    """The server holds as much as it may, and evicts nothing for a new block."""


class NotABlockError(ServerRefusedError):
    """What stands under a block's name is no value at all. A store would replace it."""


_CLASSES: dict[str, type[OSError]] = {
    "OOM ": ServerFullError,
    "WRONGTYPE ": NotABlockError,
    **dict.fromkeys(_PASSING, ServerBusyError),
}
"""By the beginning of a refusal; ``ServerRefusedError`` is all else."""


def refusal(address: str, line: str, secrets: Collection[str] = ()) -> OSError:
    """The error reply *line*, such as ``OOM command not allowed when used memory > 'maxmemory'.``, as a fault."""
    repeated = mask_text(line, secrets).partition(_REPEATED)[0]
    said = "".join(letter if letter.isprintable() else "?" for letter in repeated)
    advice = _by_beginning(_ADVICE, line)
    text = f"{address} answered: {said}" + (f"; {advice}" if advice else "")
    return (_by_beginning(_CLASSES, line) or ServerRefusedError)(text)


def tls_refusal(address: str, error: ssl.SSLError) -> ServerRefusedError:
    """The server and this machine did not agree on how to encrypt."""
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = _CERTIFICATE_ADVICE.get(error.verify_code, "see the ssl_ options of url")
        what = error.verify_message.rstrip(".")
        return ServerRefusedError(f"{address}: its certificate is not accepted: {what}; {advice}")
    return ServerRefusedError(
        f"{address}: {error}; check that the server speaks TLS at this port, and the ssl_ options of url"
    )


def _by_beginning(table: Mapping[str, _T], line: str) -> _T | None:
    return next((value for beginning, value in table.items() if line.startswith(beginning)), None)


def masked(line: bytes, secrets: Collection[str]) -> bytes:
    """What a server sent, without *secrets*."""
    return mask_text(line.decode(errors="surrogateescape"), secrets).encode(errors="surrogateescape")
