"""What ``[tiers.NAME]`` with ``type = "valkey"`` may say, refused here when it can't be meant."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field, SecretStr, field_validator

from kvtier_core.tier import TierSettings
from kvtier_valkey.location import Location, parse_url


class ValkeySettings(TierSettings):
    """The settings of one Valkey tier."""

    url: str
    """Where the server is: `redis://HOST:PORT/DB`, `rediss://` for TLS, `redis+sentinel://HOST:PORT,HOST:PORT/NAME`, or
    `unix:///PATH`; also `valkey://` and `valkeys://`."""
    username: SecretStr | None = None
    """User to log in as; unset, the one in `url`."""
    password: SecretStr | None = None
    """The user's password; unset, the one in `url`."""
    prefix: Annotated[str, Field(min_length=1)] = "kvtier"
    """Beginning of the name of every key."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parse_url(url)
        return url

    @property
    def location(self) -> Location:
        """The server, and the login."""
        location = parse_url(self.url)
        if self.username is not None:
            location = replace(location, username=self.username.get_secret_value())
        if self.password is not None:
            location = replace(location, password=self.password.get_secret_value())
        return location
