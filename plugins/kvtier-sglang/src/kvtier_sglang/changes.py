"""Counts the calls by which a running engine's weights may change. Counted before the call, on the scheduler's thread.

SGLang flushes its cache after some of them and not after others. Between the call and the next flush kvtier neither
gives nor takes a page: what is in the engine's cache may be of either weights.
"""


class WeightChanges:
    """How often the weights of this process's engine may have changed."""

    def __init__(self) -> None:
        self.count = 0
        self.is_watched = False
        """Whether the calls are counted: SGLang has loaded the plugin."""

    def note(self, *_args: object, **_kwargs: object) -> None:
        """SGLang is about to change weights."""
        self.count += 1


CHANGES = WeightChanges()
