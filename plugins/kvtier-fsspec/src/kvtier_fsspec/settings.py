"""What ``[tiers.NAME]`` with ``type = "fsspec"`` may say, refused here when it can't be meant.

Decides from the text of the URL alone: no I/O, no import of a protocol's package. No message repeats the URL, which
may hold a password.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvtier_core.tier import TierSettings

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Protocols whose URLs start with a bucket (or container), and whose single put is visible whole or not at all."""

_READ_ONLY = frozenset({"http", "https", "data", "github", "zip", "tar"})


class FsspecSettings(TierSettings):
    """The settings of one fsspec tier."""

    url: str
    """Where the blocks live, such as `s3://bucket/prefix` or `file:///directory`."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the client behind the URL, such as `endpoint_url`; they are secret."""
    publish: Literal["auto", "put", "move"] = "auto"
    """How a block on a file system becomes visible: by one `"put"`, or by a put elsewhere and a `"move"`."""
    compression: Literal["none", "zstd"] = "none"
    """How blocks are written to a bucket: `"zstd"` takes fewer bytes and more CPU; both are read in any case."""
    parallel_requests: Annotated[int, Field(ge=1, le=1024)] = 32
    """Small requests that may be under way at a time, beside those of `threads`."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        protocol, separator, rest = url.partition("://")
        if not separator or not protocol:
            raise ValueError("url needs a protocol, such as s3://bucket/prefix or file:///directory")
        if "::" in url:
            raise ValueError(
                "url must be one plain URL: what a chain of URLs (a::b) caches would be served stale"
            )
        if protocol in _READ_ONLY:
            raise ValueError(
                f"url: nothing can be stored over {protocol}://; use a protocol that can be written to"
            )
        if protocol in OBJECT_STORES and (not rest or rest.startswith("/")):
            raise ValueError(f"url names no bucket: write {protocol}://BUCKET/PREFIX")
        return url

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        if self.protocol in OBJECT_STORES and self.policy != "lru":
            raise ValueError(
                f'policy = "{self.policy}": of a bucket whole objects leave, the longest unused first; leave policy out'
            )
        return self

    @model_validator(mode="after")
    def _check_compression(self) -> Self:
        if self.protocol not in OBJECT_STORES and self.compression != "none":
            raise ValueError(
                f'compression = "{self.compression}" is for buckets: on {self.protocol}:// the size tells whether a '
                "block is whole; leave compression out"
            )
        return self

    @property
    def protocol(self) -> str:
        """The part of the URL before ``://``."""
        return self.url.partition("://")[0]
