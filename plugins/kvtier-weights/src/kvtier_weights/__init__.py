"""Digests of models' weights, for engine adapters: one for all engines, so that they share what was read once."""

from kvtier_weights.changes import changed_since, process_began_ns
from kvtier_weights.digests import digest_weights, is_settled, list_model_files, look_at_file

__all__ = [
    "changed_since",
    "digest_weights",
    "is_settled",
    "list_model_files",
    "look_at_file",
    "process_began_ns",
]
