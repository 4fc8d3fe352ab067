"""How many blocks take room in a tier, as the core counts them."""

from kvtier_core.manager.blocking.bounds import BoundedContents
from kvtier_core.manager.blocking.contents import Contents
from kvtier_testing.driving import TierDriver


def num_held(driver: TierDriver) -> int:
    """Blocks of a driven ``BlockTier``."""
    return num_blocks(driver.backend.port._current.state._contents)


def num_blocks(contents: Contents) -> int:
    """Blocks of *contents*; those that the core bounds and deletes are among them."""
    if isinstance(contents, BoundedContents):
        return len(contents._stored) + len(contents._leaving)
    return len(contents.presence._keys)
