"""The errors kvtier raises on purpose. Each is also the standard error a caller would expect.

A message says what went wrong, where, which plugin and version it concerns, and what to do.
Nothing here formats a secret: callers pass text that is already masked.
"""


class KvtierError(Exception):
    """Base of every error kvtier raises on purpose."""

    is_explained = True
    """Whether the message says what to do; not where it only repeats what somebody else's code raised."""


class ConfigError(KvtierError, ValueError):
    """A setting is unknown, of the wrong type, or makes no sense together with another."""


class PluginError(KvtierError, ImportError):
    """A plugin could not be found, imported or accepted."""


class TierOpenError(KvtierError, OSError):
    """A tier could not open its storage. Raised by a tier's ``open``."""


class PoolError(KvtierError, MemoryError):
    """The host memory pool could not be created or does not fit what was asked."""


class UnsupportedModelError(KvtierError, TypeError):
    """An engine adapter was given a model whose KV layout it does not know."""


class UnknownRequestError(KvtierError, LookupError):
    """A request id was used that is not known: never begun, or already finished."""


class ClosedError(KvtierError, RuntimeError):
    """The object was used after its shutdown."""
