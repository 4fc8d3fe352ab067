"""Where a server is and how to log in there, from the text of a URL.

Decides by the text alone: no I/O. No message repeats the URL, which may hold a password.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, unquote

_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")
_TLS_SCHEMES = ("rediss", "valkeys")
_SENTINEL = "+sentinel"
_PORT = 6379
_SENTINEL_PORT = 26379
_MOST_PORT = 65535
_OPTIONS = {"db": None, "password": None}
_SENTINEL_OPTIONS = {"sentinel_password": None}
_TLS_OPTIONS = {
    "ssl_ca_certs": None,
    "ssl_ca_path": None,
    "ssl_cert_reqs": ("required", "optional", "none"),
    "ssl_certfile": None,
    "ssl_check_hostname": ("true", "false"),
    "ssl_keyfile": None,
    "ssl_password": None,
}
"""By name, the values that each may have; ``None`` for any."""
_MOST_DIGITS = 9
"""Of a database's number: no server has so many."""
_SERVER = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^\[\]:]*))(?::(?P<port>[0-9]*))?")
_BARE_ADDRESS = re.compile(r"[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*(?:%\w+(?::\d+)?)?")


@dataclass(frozen=True, kw_only=True)
class Location:
    """A server, and a login."""

    host: str = ""
    port: int = _PORT
    path: str = ""
    """Of a Unix socket, in place of host and port."""
    database: int = 0
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: Mapping[str, str] | None = field(default=None, repr=False)
    """The ``ssl_`` options; ``None`` without TLS."""
    sentinels: "tuple[Location, ...]" = ()
    """Those who know where the primary is, in place of host and port."""
    service: str = ""
    """What sentinels call the primary."""

    @property
    def address(self) -> str:
        """As messages name the server."""
        if self.sentinels:
            return f"{self.service} (of the sentinels {', '.join(one.address for one in self.sentinels)})"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"

    @property
    def secrets(self) -> frozenset[str]:
        """What no message shows."""
        return frozenset((self.username, self.password)) - {""}


def parse_url(url: str) -> Location:
    """What *url* says. Raises ``ValueError`` with what to write instead."""
    scheme, separator, rest = url.strip().partition("://")
    scheme = scheme.lower()
    if "cluster" in scheme:
        raise ValueError(
            "url: clusters are not followed; name one server of its own, or a proxy before the cluster, as "
            "redis://HOST:PORT"
        )
    has_sentinels = scheme.endswith(_SENTINEL)
    scheme = scheme.removesuffix(_SENTINEL)
    if not separator or scheme not in _SCHEMES or (has_sentinels and scheme == "unix"):
        raise ValueError(
            "url must begin with redis:// or valkey://, rediss:// or valkeys:// (TLS), redis+sentinel://, or unix:// "
            "(a socket's path)"
        )
    if "#" in rest:
        raise ValueError("url: nothing is read behind #; write it as %23 in a password or a path")
    place = re.split("[/?]", rest, maxsplit=1)[0]
    path, _, query = rest.removeprefix(place).partition("?")
    login, _, place = place.rpartition("@")
    known = {
        **_OPTIONS,
        **(_SENTINEL_OPTIONS if has_sentinels else {}),
        **(_TLS_OPTIONS if scheme in _TLS_SCHEMES else {}),
    }
    options = _options(scheme, query, known)
    path, database = unquote(path), options.pop("db", "")
    username, _, password = (unquote(word) for word in login.partition(":"))
    password = options.pop("password", password)
    if scheme == "unix":
        if place or not path:
            raise ValueError("url names no socket: write unix:///PATH, with three slashes")
        return Location(path=path, database=_database(database), username=username, password=password)
    servers = [_server(one, _SENTINEL_PORT if has_sentinels else _PORT) for one in place.split(",")]
    service, _, number = path.strip("/").partition("/") if has_sentinels else ("", "", path.strip("/"))
    sentinel_password = options.pop("sentinel_password", "")
    tls = options if scheme in _TLS_SCHEMES else None
    found = Location(
        database=_database(database or number), username=username, password=password, tls=tls, service=service
    )
    if has_sentinels:
        if not service:
            raise ValueError("url names no primary: write redis+sentinel://HOST:PORT,HOST:PORT/NAME")
        asked = [
            Location(host=host, port=port, password=sentinel_password, tls=tls) for host, port in servers
        ]
        return replace(found, sentinels=tuple(asked))
    if len(servers) > 1:
        raise ValueError(
            "url names several servers: write one, or redis+sentinel://HOST:PORT,HOST:PORT/NAME if they are sentinels"
        )
    return replace(found, host=servers[0][0], port=servers[0][1])


def _server(text: str, port: int) -> tuple[str, int]:
    """Host and port, as in ``a:1``, ``a`` or ``[::1]:1``. Raises ``ValueError``, which repeats no password."""
    if _BARE_ADDRESS.fullmatch(text):
        raise ValueError("url: write an IPv6 address in brackets, as in redis://[::1]:6379")
    found = _SERVER.fullmatch(text)
    if found is None:
        raise ValueError(
            "url: host and port can't be told apart; write / and @ in a password as %2F and %40, or set password"
        )
    host = (found["name"] or "").lower()
    if found["address"] is None:
        _check_host(host)
    else:
        host = _ipv6(unquote(found["address"]))
    return host, _port(found["port"]) if found["port"] else port


def is_place(host: str, port: str) -> bool:
    """Whether a server can be there, by the text alone."""
    try:
        _check_host(host)
        _port(port)
    except ValueError:
        return False
    return True


def _port(text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    if not (is_number and 0 < int(text) <= _MOST_PORT):
        raise ValueError(f"url: a port is a number from 1 to {_MOST_PORT}")
    return int(text)


def _ipv6(text: str) -> str:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        raise ValueError("url: in brackets belongs an IPv6 address, as in redis://[::1]:6379") from None
    return text


def _check_host(host: str) -> None:
    if not host:
        raise ValueError("url names no server: write redis://HOST:PORT")
    try:
        is_name = host.isprintable() and bool(host.encode("idna"))
    except UnicodeError:
        is_name = False
    if not is_name:
        raise ValueError(
            "url: the host is no name: its parts, between single dots, have 1 to 63 characters each"
        )


def _options(scheme: str, query: str, known: Mapping[str, tuple[str, ...] | None]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, values in parse_qs(query, keep_blank_values=True).items():
        if name not in known:
            raise ValueError(f"url: no option {name} of {scheme}://; there are {', '.join(known)}")
        if len(values) > 1:
            raise ValueError(f"url: option {name} is there {len(values)} times")
        allowed = known[name]
        if allowed is not None and values[0] not in allowed:
            raise ValueError(f"url: option {name} must be {' or '.join(allowed)}")
        found[name] = values[0]
    if "ssl_keyfile" in found and "ssl_certfile" not in found:
        raise ValueError("url: ssl_keyfile needs ssl_certfile")
    if found.get("ssl_cert_reqs") == "none" and found.get("ssl_check_hostname") == "true":
        raise ValueError("url: ssl_check_hostname=true needs a certificate: leave out ssl_cert_reqs=none")
    return found


def _database(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > _MOST_DIGITS:
        raise ValueError("url: the database must be a number, as in redis://HOST:PORT/2")
    return int(text)
