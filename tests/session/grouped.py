"""A toy engine whose layers form several KV groups, over a device of plain bytes: what a block holds is its tokens."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.manager import TierBuild, TierManager
from kvtier_core.manager.guard import TierIdentity
from kvtier_core.manager.hook_tier import HookTier
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.policies import make_policy
from kvtier_core.proof import row_bytes_for
from kvtier_core.session import EngineSession
from kvtier_core.tier_settings import TierLimits, TierSettings
from kvtier_core.transfer.device import TransferResult
from kvtier_core.transfer.direction import Direction
from kvtier_core.transfer.plan import GroupTransfer
from kvtier_core.transfer.pool import Pool, PoolGeometry
from kvtier_core.values import TierContext, TierInfo
from kvtier_testing.faulty import FaultyTier
from tests.session.toy import PATIENCE_S

PAYLOAD = 4000
APART = 1000
"""Device block ids of one group and the next: the device finds the group by the id."""


def content(group: int, tokens: Sequence[int], first: int) -> bytes:
    """What a model computes for these tokens, the first of which stands at *first*, in a group."""
    digest = hashlib.sha256(repr(list(tokens)).encode()).hexdigest()
    return repr((group, first, digest)).encode().ljust(PAYLOAD, b".")


def _pairs(parts: Sequence[GroupTransfer]) -> list[tuple[int, int]]:
    return [
        (int(block_id), int(row))
        for part in parts
        for block_id, row in zip(part.block_ids, part.rows, strict=True)
    ]


class BytesDevice:
    """A device whose blocks are bytes by their id. It moves at once, or fails, and may be told to."""

    def __init__(self, pool: Pool) -> None:
        self.blocks: dict[int, bytes] = {}
        self.failing_groups: set[int] = set()
        """Groups whose blocks can't be loaded."""
        self.is_stuck = False
        """Transfers do not end until this is taken back."""
        self.stored: list[int] = []
        """Device blocks stored, in order."""
        self.loaded: list[int] = []
        """Device blocks loaded, in order."""
        self._pool = pool
        self._results: list[TransferResult] = []

    def submit(self, direction: Direction, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        if direction is Direction.STORE:
            self._store(job_id, parts)
        else:
            self._load(job_id, parts)

    def _store(self, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        for block_id, row in _pairs(parts):
            self._pool.row(row)[:PAYLOAD] = self.blocks[block_id]
            self.stored.append(block_id)
        self._results.append(TransferResult(job_id=job_id, direction=Direction.STORE, ok=True))

    def _load(self, job_id: int, parts: Sequence[GroupTransfer]) -> None:
        pairs = _pairs(parts)
        ok = self.failing_groups.isdisjoint(block_id // APART for block_id, _ in pairs)
        for block_id, row in pairs:
            self.blocks[block_id] = bytes(self._pool.row(row)[:PAYLOAD]) if ok else b"?"
            self.loaded.append(block_id)
        self._results.append(TransferResult(job_id=job_id, direction=Direction.LOAD, ok=ok))

    def get_finished(self) -> list[TransferResult]:
        if self.is_stuck:
            return []
        results, self._results = self._results, []
        return results

    def wait(self, direction: Direction, job_ids: Iterable[int], timeout_s: float) -> bool:
        return not self.is_stuck or not any(
            result.job_id in job_ids and result.direction is direction for result in self._results
        )

    def shutdown(self, timeout_s: float) -> bool:
        return True


class GroupedToy:
    """A toy engine: it computes every block of every group from the tokens, and checks what it loads."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        tokens_per_block: int,
        num_rows: int,
        tiers: dict[str, FaultyTier],
    ) -> None:
        self.namespace = Namespace(
            model="grouped",
            kv_dtype="bytes",
            tokens_per_block=tokens_per_block,
            groups=groups,
            layout="toy",
            weights_digest="w",
        )
        self.pool = Pool.create(PoolGeometry(num_rows=num_rows, row_bytes=row_bytes_for(PAYLOAD)))
        self._tiers = tiers
        manager = TierManager(
            pool=self.pool,
            namespace=self.namespace,
            tiers=[self._tier("one")],
            policy=make_policy("lru", num_rows),
            limits=PoolLimits(
                max_promotion_rows=max(1, num_rows // 2),
                max_cascade_rows=num_rows,
                lease_timeout_s=30.0,
                device_timeout_s=60.0,
            ),
        )
        manager.open(PATIENCE_S)
        self.device = BytesDevice(self.pool)
        self.session = EngineSession(manager, self.device, self.pool, tokens_per_block)

    def _tier(self, name: str) -> TierBuild:
        def build(context: TierContext) -> FaultyTier:
            self._tiers[name] = FaultyTier(TierSettings(type="faulty"), context)
            return self._tiers[name]

        return TierBuild(
            name=name,
            identity=TierIdentity(name=name, type="faulty", distribution="test", version="1"),
            info=TierInfo(medium="memory"),
            limits=TierLimits(max_cascade=1.0),
            capacity_bytes=None,
            make_port=partial(HookTier, build),
        )

    def ids(self, num_tokens: int) -> dict[int, list[int]]:
        """Device blocks for so many tokens, of every cached group."""
        return {
            index: [index * APART + i for i in range(-(-num_tokens // self.namespace.tokens_of(group)))]
            for index, group in self.namespace.cached_groups.items()
        }

    def compute(self, tokens: Sequence[int], ids: Mapping[int, Sequence[int]], begin: int = 0) -> None:
        """Compute the whole blocks that end behind *begin*."""
        for index, group in self.namespace.cached_groups.items():
            size = self.namespace.tokens_of(group)
            for number in range(begin // size, len(tokens) // size):
                block = tokens[number * size : (number + 1) * size]
                self.device.blocks[ids[index][number]] = content(index, block, number * size)

    def check(self, tokens: Sequence[int], ids: Mapping[int, Sequence[int]], loaded: int) -> None:
        """Assert that what a group needs of the first *loaded* tokens is in its device blocks."""
        for index, group in self.namespace.cached_groups.items():
            size = self.namespace.tokens_of(group)
            assert loaded % size == 0
            first = 0 if group.window is None else max(0, loaded - group.window) // size
            for number in range(first, loaded // size):
                block = tokens[number * size : (number + 1) * size]
                expected = content(index, block, number * size)
                assert self.device.blocks[ids[index][number]] == expected, (index, number)

    def run(self, request_id: str, tokens: Sequence[int]) -> int:
        """A whole request; the tokens that did not have to be computed."""
        session, ids = self.session, self.ids(len(tokens))
        self.device.blocks.clear()
        session.begin(request_id, tokens)
        session.load(request_id, session.wait_matched(request_id, PATIENCE_S), ids)
        loaded = session.wait_loaded(request_id, PATIENCE_S)
        self.check(tokens, ids, loaded)
        self.compute(tokens, ids, loaded)
        session.computed(request_id, len(tokens), ids)
        session.end(request_id)
        assert session.flush(PATIENCE_S)
        return loaded

    def empty_pool(self) -> None:
        """Push everything out of the pool."""
        size = max(self.namespace.tokens_of(group) for group in self.namespace.cached_groups.values())
        for number in range(self.pool.geometry.num_rows):
            self.run(f"evict-{number}", [10_000 + number] * (size + 1))
