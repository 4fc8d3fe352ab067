"""Digests of models' weights, for engine adapters: one for all engines, so that they share what was read once."""

from kvtier_weights.digests import digest_weights, is_settled, list_model_files, look_at_file

__all__ = ["digest_weights", "is_settled", "list_model_files", "look_at_file"]
