"""The coordinator's answers to the engine: how much can be loaded, which rows a device transfer uses. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_core.keys import OffloadKey
from kvtier_core.values import LookupState, MissReason

_SETTLED = (LookupState.HIT, LookupState.MISS)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Up to which token a prompt can be loaded, in all of its groups."""

    tokens: int
    """The end point once the answer is settled, and the one hoped for until then."""
    ready_tokens: int
    """What could be loaded now. While more is pending, only a lone group of full attention is promised that much."""
    state: LookupState
    """``RETRY`` while a block is not even on its way, ``HIT_PENDING`` while all that are not ready are (C10).

    Of a settled answer, ``HIT`` when all that was asked for can be loaded, else ``MISS``.
    """
    reason: MissReason | None = None
    """Why the end point is not a later one."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is pending: asking again after the next step could give no more."""
        return self.state in _SETTLED


@dataclass(frozen=True, slots=True)
class PreparedTransfer:
    """A device transfer to carry out: row ``rows[i]`` is the block of ``keys[i]``; end it by its ``job_id``."""

    job_id: int
    keys: Sequence[OffloadKey]
    rows: Sequence[int]
    evicted: Sequence[OffloadKey] = ()
    sources: Sequence[str] = ()
    """For a load: where each block came from, ``pool`` or a tier's name."""
