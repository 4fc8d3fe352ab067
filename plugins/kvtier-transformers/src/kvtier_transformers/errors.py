"""The error of a cache that is used for what it can't hold."""

from kvtier_core import KvtierError


class CacheError(KvtierError, ValueError):
    """The cache was used for what it can't hold: another batch, too many tokens, another dtype, gradients.

    Or for KV that is not that of its token ids.
    """
