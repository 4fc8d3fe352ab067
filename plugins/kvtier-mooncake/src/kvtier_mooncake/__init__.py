"""A tier on a Mooncake Store: the memory of many machines, moved over TCP or RDMA straight from and to the pool's rows.

The store decides which blocks leave and where they lie. This package never holds a block itself.
"""

from kvtier_mooncake.settings import MooncakeSettings
from kvtier_mooncake.tier import MooncakeTier

__all__ = ["MooncakeSettings", "MooncakeTier"]
