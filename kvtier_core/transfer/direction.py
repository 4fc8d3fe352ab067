"""The two directions of a transfer. Nothing else: everything in kvtier may import it."""

import enum


class Direction(enum.Enum):
    """A store goes one step colder, a load one step warmer."""

    STORE = "store"
    LOAD = "load"
