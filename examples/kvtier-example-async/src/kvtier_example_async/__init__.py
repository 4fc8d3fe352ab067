"""An example of a tier on the hook specs: asynchronous, several jobs in flight on threads of its own."""

from kvtier_example_async.tier import AsyncSettings, AsyncTier

__all__ = ["AsyncSettings", "AsyncTier"]
