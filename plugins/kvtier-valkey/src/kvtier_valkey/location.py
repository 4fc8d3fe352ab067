"""Where a server is and how to log in there, from the text of a URL.

Decides by the text alone: no I/O. No message repeats the URL, which may hold a password.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, unquote, urlsplit

_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")
_TLS_SCHEMES = ("rediss", "valkeys")
_SENTINEL = "+sentinel"
_PORT = 6379
_SENTINEL_PORT = 26379
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
        return self.path or f"{self.host}:{self.port}"


def parse_url(url: str) -> Location:
    """What *url* says. Raises ``ValueError`` with what to write instead."""
    scheme = url.partition("://")[0].lower()
    if "cluster" in scheme:
        raise ValueError(
            "url: clusters are not followed; name one server of its own, or a proxy before the cluster, as "
            "redis://HOST:PORT"
        )
    has_sentinels = scheme.endswith(_SENTINEL)
    scheme = scheme.removesuffix(_SENTINEL)
    if "://" not in url or scheme not in _SCHEMES or (has_sentinels and scheme == "unix"):
        raise ValueError(
            "url must begin with redis:// or valkey://, rediss:// or valkeys:// (TLS), redis+sentinel://, or unix:// "
            "(a socket's path)"
        )
    try:
        parts = urlsplit(url)
        servers = _servers(parts.netloc.rpartition("@")[2], _SENTINEL_PORT if has_sentinels else _PORT)
    except ValueError:  # its text may repeat a part of the password
        raise ValueError(
            "url: host and port can't be told apart; write / and @ in a password as %2F and %40, or set password"
        ) from None
    known = {
        **_OPTIONS,
        **(_SENTINEL_OPTIONS if has_sentinels else {}),
        **(_TLS_OPTIONS if scheme in _TLS_SCHEMES else {}),
    }
    options = _options(scheme, parts.query, known)
    path, database = unquote(parts.path), options.pop("db", "")
    username, _, password = (unquote(word) for word in parts.netloc.rpartition("@")[0].partition(":"))
    password = options.pop("password", password)
    if scheme == "unix":
        if not path:
            raise ValueError("url names no socket: write unix:///PATH")
        return Location(path=path, database=_database(database), username=username, password=password)
    for host, _ in servers:
        _check_host(host)
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


def _servers(text: str, port: int) -> list[tuple[str, int]]:
    """Hosts and ports, as in ``a:1,b``. Raises ``ValueError``."""
    each = [urlsplit(f"//{server}") for server in text.split(",")]
    return [(one.hostname or "", one.port or port) for one in each]


def _check_host(host: str) -> None:
    if not host:
        raise ValueError("url names no server: write redis://HOST:PORT")
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(
            "url: the host is no name: its parts, between single dots, have 1 to 63 characters each"
        ) from None


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
