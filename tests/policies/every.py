"""Every eviction policy of this repository by name, also where the plugin's entry points are not installed."""

from collections.abc import Mapping

from kvtier_core.policies import BUILT_IN, PolicyFactory
from kvtier_policies import ARC, S3FIFO

FROM_PLUGINS: Mapping[str, PolicyFactory] = {"arc": ARC, "s3fifo": S3FIFO}
EVERY: Mapping[str, PolicyFactory] = {**BUILT_IN, **FROM_PLUGINS}
