"""What kvtier counts, as a part of what SGLang says of itself: ``/server_info``, or ``Engine.get_server_info()``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NAME = "kvtier"
"""Where it is in each of ``internal_states``."""


class Figures:
    """The figures of this process's linker, where there is one."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, Any]] | None = None
        """Called on the scheduler's thread."""

    def add(self, said: Any, *_args: object, **_kwargs: object) -> None:
        """SGLang's scheduler is about to answer *said*."""
        if self.read is not None:
            said.internal_state[NAME] = self.read()


FIGURES = Figures()
