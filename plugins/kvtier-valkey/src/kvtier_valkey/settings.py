"""What ``[tiers.NAME]`` with ``type = "valkey"`` may say, refused here when it can't be meant.

Decides from the text of the settings alone: no I/O. No message repeats the URL, which may hold a password.
"""

from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, SecretStr, field_validator

from kvtier_core.tier import TierSettings

_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")
_TLS_SCHEMES = ("rediss", "valkeys")
_SEVERAL_SERVERS = ("cluster", "sentinel")
_OPTIONS = ("db", "password")
_TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_keyfile",
    "ssl_password",
)


class ValkeySettings(TierSettings):
    """The settings of one Valkey tier."""

    url: str
    """Where the server is: `redis://HOST:PORT/DB`, `rediss://` for TLS, or `unix:///PATH`; also `valkey://` and
    `valkeys://`."""
    username: SecretStr | None = None
    """User to log in as; unset, the one in `url`."""
    password: SecretStr | None = None
    """The user's password; unset, the one in `url`."""
    prefix: Annotated[str, Field(min_length=1)] = "kvtier"
    """Beginning of the name of every key."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        scheme = url.partition("://")[0].lower()
        if any(word in scheme for word in _SEVERAL_SERVERS):
            raise ValueError(
                "url: sentinels and clusters are not followed; name one primary, or a proxy that leads to it, as "
                "redis://HOST:PORT"
            )
        if "://" not in url or scheme not in _SCHEMES:
            raise ValueError(
                "url must begin with redis:// or valkey://, rediss:// or valkeys:// (TLS), or unix:// (a socket's path)"
            )
        try:
            parts = urlsplit(url)
            server = parts.hostname, parts.port
        except ValueError:  # its text may repeat a part of the password
            raise ValueError(
                "url: host and port can't be told apart; write / and @ in a password as %2F and %40, "
                "or set password"
            ) from None
        if scheme == "unix" and not parts.path:
            raise ValueError("url names no socket: write unix:///PATH")
        if scheme != "unix" and not server[0]:
            raise ValueError("url names no server: write redis://HOST:PORT")
        allowed = _OPTIONS + (_TLS_OPTIONS if scheme in _TLS_SCHEMES else ())
        for name in parse_qs(parts.query, keep_blank_values=True):
            if name not in allowed:
                raise ValueError(f"url: no option {name} of {scheme}://; there are {', '.join(allowed)}")
        return url
