"""What goes wrong in a llama.cpp engine that is no fault of a setting."""

from kvtier_core import KvtierError


class LlamaError(KvtierError):
    """The engine can't do this now; the message says why and what to do."""
