"""A pool in front of one blocking tier, driven as an engine drives it: what a request is told, and what it gets."""

import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from kvtier_core.blocktier import BlockTier
from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.keys import OffloadKey
from kvtier_core.manager import TierBuild, TierManager
from kvtier_core.manager.blocking import BlockingTier
from kvtier_core.manager.guard import TierIdentity
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.policies import make_policy
from kvtier_core.proof import row_bytes_for
from kvtier_core.transfer.pool import Pool, PoolGeometry
from kvtier_core.values import MissReason, RequestInfo
from kvtier_testing.driving import PATIENCE_S
from kvtier_testing.rows import RowMaker

PAYLOAD = 4000


class TierEngine:
    """Use it as a context manager: leaving shuts the tier down."""

    def __init__(
        self,
        tier_class: type[BlockTier],
        *,
        num_rows: int = 64,
        model: str = "m",
        weights: str | None = "w",
        **settings: object,
    ) -> None:
        """Open the tier; ``weights=None`` are unknown ones. Raises ``TierOpenError``."""
        namespace = Namespace(
            model=model,
            kv_dtype="float32",
            tokens_per_block=16,
            groups=(GroupSpec(layers=("0",), block_bytes=PAYLOAD),),
            layout="test",
            weights_digest=weights,
        )
        chosen = tier_class.Settings.model_validate({"type": "test", **settings})
        tier_class = tier_class.for_settings(chosen)
        self.namespace = namespace.name
        self.maker = RowMaker(namespace.name, PAYLOAD)
        self.reasons: set[MissReason] = set()
        """Why lookups ended so far."""
        self._pool = Pool.create(PoolGeometry(num_rows=num_rows, row_bytes=row_bytes_for(PAYLOAD)))
        self.manager = TierManager(
            pool=self._pool,
            namespace=namespace,
            tiers=[
                TierBuild(
                    name="far",
                    identity=TierIdentity(name="far", type="test", distribution="test-dist", version="1"),
                    info=tier_class.info,
                    limits=chosen.limits,
                    capacity_bytes=tier_class.info.resolve_capacity(chosen.capacity),
                    make_port=partial(BlockingTier, tier_class, chosen),
                )
            ],
            policy=make_policy("lru", num_rows),
            limits=PoolLimits(
                max_promotion_rows=num_rows,
                max_cascade_rows=num_rows,
                lease_timeout_s=60.0,
                device_timeout_s=60.0,
            ),
        )
        try:
            self.manager.open(PATIENCE_S)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self.manager.shutdown(PATIENCE_S)
        self._pool.close()

    def store(self, request_id: str, keys: Sequence[OffloadKey]) -> None:
        """Have a request compute these blocks, and wait until the tier has been given them, if it is."""
        self.start_store(request_id, keys)
        self.wait_until(lambda: not self.manager.has_pending_work)

    def start_store(self, request_id: str, keys: Sequence[OffloadKey]) -> None:
        """Have a request compute these blocks."""
        self.manager.new_request(RequestInfo(request_id=request_id))
        prepared = self.manager.reserve_store(request_id, keys)
        assert prepared is not None
        for key, row in zip(prepared.keys, prepared.rows, strict=True):
            self._pool.row(row)[:PAYLOAD] = self.maker.make(key)[:PAYLOAD]
        if prepared.keys:
            self.manager.commit_store(prepared.job_id, success=True)
        self.manager.request_finished(request_id)

    def load(self, request_id: str, keys: Sequence[OffloadKey]) -> int:
        """Have a request ask for these blocks. How many of the first it gets; all of them are right, or this fails."""
        asked = tuple(keys)
        self.manager.new_request(RequestInfo(request_id=request_id))
        self.wait_until(lambda: self.manager.lookup(request_id, (asked,)).is_settled)
        found = self.manager.lookup(request_id, (asked,))
        prepared = self.manager.reserve_load(request_id, asked[: found.ready_tokens // 16])
        for key, row in zip(prepared.keys, prepared.rows, strict=True):
            assert self._pool.row(row)[:PAYLOAD] == self.maker.make(key)[:PAYLOAD]
        if prepared.keys:
            self.manager.commit_load(prepared.job_id)
        if found.reason is not None:
            self.reasons.add(found.reason)
        self.manager.request_finished(request_id)
        return len(prepared.keys)

    def wait_until(self, is_done: Any) -> None:
        """Go on stepping until that is so."""
        give_up = time.monotonic() + PATIENCE_S
        while not is_done():
            assert time.monotonic() < give_up, "still pending"
            self.manager.end_step()
            self.manager.wait(0.2)
