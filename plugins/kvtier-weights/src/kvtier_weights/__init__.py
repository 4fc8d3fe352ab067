"""Digests of models' weights, for engine adapters: one for all engines, so that they share what was read once."""

from kvtier_weights.digests import digest_weights, list_model_files

__all__ = ["digest_weights", "list_model_files"]
