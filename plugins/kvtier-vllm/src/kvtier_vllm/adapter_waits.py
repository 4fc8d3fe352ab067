"""What waits until the files of LoRA adapters have been looked at: requests that ask, and stores that are over.

Decides how long they wait and what holds then. Names no vLLM type.
"""

from dataclasses import dataclass
from time import monotonic

from kvtier_vllm.adapters import PATIENCE_S, Adapter


class AdapterWait:
    """One request's wait for its adapter: an answer rests on a look that began after the request had asked."""

    def __init__(self, adapter: Adapter | None) -> None:
        self.adapter = adapter
        self._look: int | None = None
        """The look that it needs; ``None`` before it asks, and once it runs."""
        self._ends_at = 0.0
        self.is_known = adapter is None
        """Whether it was known what its adapter is when it asked last."""
        self.must_wait = False
        """Whether that may be known soon."""

    def ask(self) -> None:
        """It asks, once a step."""
        if self.adapter is None:
            return
        if self._look is None:
            self._look, self._ends_at = self.adapter.look(), monotonic() + PATIENCE_S
        has_looked = self.adapter.has_looked(self._look)
        self.is_known = has_looked and self.adapter.identity is not None
        is_soon = not has_looked or (not self.is_known and self.adapter.is_being_digested)
        self.must_wait = is_soon and monotonic() < self._ends_at
        if not has_looked and not self.must_wait:
            self.adapter.be_late()

    def end_step(self) -> None:
        """A step is over. If it still waits, its next answer rests on another look, if that is there in time."""
        if self.adapter is not None:
            self.adapter.take()
            if self._look is not None:
                self.adapter.look()

    def run(self) -> None:
        """It is let run, so that vLLM may read the adapter's files."""
        self._look = None
        if self.adapter is not None:
            self.adapter.may_be_read()


@dataclass(frozen=True)
class _Store:
    job: int
    adapter: Adapter
    look: int
    ends_at: float


class UnprovenStores:
    """Stores that all workers have done. VLLM has read their adapter's files by then: they are looked at once more."""

    def __init__(self) -> None:
        self._stores: list[_Store] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._stores)

    def add(self, job: int, adapter: Adapter) -> None:
        """One more is done."""
        self._stores.append(_Store(job, adapter, adapter.look(), monotonic() + PATIENCE_S))

    def take_proven(self) -> list[tuple[int, bool]]:
        """The jobs of those that wait no longer, and whether they hold what their adapter's files say."""
        proven, left = [], []
        for store in self._stores:
            has_looked = store.adapter.has_looked(store.look)
            if not has_looked and monotonic() < store.ends_at:
                left.append(store)
                continue
            if not has_looked:
                store.adapter.be_late()
            proven.append((store.job, has_looked and store.adapter.is_trusted))
        self._stores = left
        return proven

    def take_all(self) -> list[int]:
        """The jobs of all of them, which nobody will prove."""
        jobs = [store.job for store in self._stores]
        self._stores = []
        return jobs
