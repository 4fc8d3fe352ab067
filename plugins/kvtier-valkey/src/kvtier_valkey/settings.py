"""What ``[tiers.NAME]`` with ``type = "valkey"`` may say, refused here when it can't be meant.

Decides from the text of the settings alone: no I/O. No message repeats the URL, which may hold a password.
"""

from typing import Annotated, Self
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from kvtier_core.tier import TierSettings

_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")
_SEVERAL_SERVERS = ("cluster", "sentinel")


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
        parts = urlsplit(url)
        if scheme == "unix" and not parts.path:
            raise ValueError("url names no socket: write unix:///PATH")
        if scheme != "unix":
            _check_server(parts.hostname, parts.netloc)
        for name in parse_qs(parts.query, keep_blank_values=True):
            if name not in ("db", "password") and not name.startswith("ssl_"):
                raise ValueError(
                    f"url: the option {name} can't be set; db, password and those that begin with ssl_ can"
                )
        return url

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.capacity is not None:
            raise ValueError(
                "capacity: the server bounds itself; leave capacity out, and set the server's maxmemory and "
                "maxmemory-policy"
            )
        if self.policy != "lru":
            raise ValueError(
                f'policy = "{self.policy}": the server chooses what leaves; leave policy out, and set the server\'s '
                "maxmemory-policy"
            )
        return self


def _check_server(host: str | None, server: str) -> None:
    if not host:
        raise ValueError("url names no server: write redis://HOST:PORT")
    if "," in server.rpartition("@")[2]:
        raise ValueError("url names several servers: name one primary, or a proxy that leads to it")
