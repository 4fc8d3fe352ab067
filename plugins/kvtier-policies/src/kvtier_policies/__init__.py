"""Eviction policies that remember what was evicted: ARC and S3-FIFO. Their names in settings: ``arc``, ``s3fifo``."""

from kvtier_policies.arc import ARC
from kvtier_policies.s3fifo import S3FIFO

__all__ = ["ARC", "S3FIFO"]
