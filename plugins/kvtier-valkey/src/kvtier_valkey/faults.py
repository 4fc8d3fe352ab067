"""What a server's refusal or a client's exception means: try again, give up, or full.

Decides by codes and classes alone; no I/O. No text holds a secret: a server that does not know AUTH repeats its
words, and those are cut off.
"""

from collections.abc import Collection

from valkey import exceptions as client

from kvtier_core.tier import mask_text

_PASSING = frozenset(
    {"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "READONLY", "TRYAGAIN", "UNBLOCKED"}
)
"""Codes of refusals that end by themselves, or with another connection: behind one name the primary may change."""
_REPEATED = ", with args beginning with"
"""Behind this a server repeats what it was sent: of AUTH, user and password."""
_LOGIN = (client.AuthenticationError, client.AuthorizationError, client.NoPermissionError)


class ServerLostError(ConnectionError):
    """The connection ended, or the server is busy with itself: the same call may well succeed in a moment."""


class ServerSilentError(OSError):
    """The server did not answer in time: the same call would wait as long again."""


class ServerRefusedError(OSError):
    """The server does not do what it is asked, and would not the next time."""


class ServerFullError(ServerRefusedError):
    """The server holds as much as it may, and evicts nothing for a new block."""


def refusal(address: str, line: str) -> OSError:
    """The error reply *line*, such as ``OOM command not allowed when used memory > 'maxmemory'.``, as a fault."""
    code = line.partition(" ")[0]
    text = f"{address} answered: {line}"
    if code in _PASSING:
        return ServerLostError(text)
    return ServerFullError(text) if code == "OOM" else ServerRefusedError(text)


def fault_of(address: str, error: Exception, secrets: Collection[str] = ()) -> OSError:
    """What an exception of the client, or of its socket, means. Its text shows none of the *secrets*."""
    if isinstance(error, ServerLostError | ServerSilentError | ServerRefusedError):
        return error
    if isinstance(error, client.TimeoutError | TimeoutError):
        return ServerSilentError(f"{address} did not answer in time")
    said = " ".join(str(error).partition(_REPEATED)[0].split()) or type(error).__name__
    said = mask_text(said, set(secrets))
    text = said if address in said else f"{address}: {said}"
    if isinstance(error, _LOGIN):
        return ServerRefusedError(text)
    if isinstance(error, client.ConnectionError | OSError):
        return ServerLostError(text)
    return ServerRefusedError(text)


def advice(error: OSError) -> str:
    """What to do when a tier can't open after *error*."""
    if isinstance(error, ServerRefusedError):
        return (
            "check username and password, and that the user may use INFO and SCAN, and GET, SET, STRLEN and UNLINK on "
            "keys that begin with prefix"
        )
    return "check that the server runs, and that url with its ssl_ options leads to it"
