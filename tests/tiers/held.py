"""How many blocks take room in a tier, as the core counts them."""

from kvtier_core.manager.blocking.bounds import BoundedContents
from kvtier_testing.driving import TierDriver


def num_held(driver: TierDriver) -> int:
    """Blocks of a driven ``BlockTier``; where the core bounds it, those being deleted are among them."""
    contents = driver.backend.port._current.state._contents
    if isinstance(contents, BoundedContents):
        return len(contents._stored) + len(contents._leaving)
    return len(contents.presence)
