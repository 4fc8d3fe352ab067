"""A manager over a real pool with fault-injecting tiers: rows of one page, keys of small numbers."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from kvtier_core.coordinator.limits import PoolLimits
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.manager import TierBuild, TierManager
from kvtier_core.manager.guard import TierIdentity
from kvtier_core.manager.hook_tier import HookTier
from kvtier_core.manager.port import MakePort
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.policies import make_policy
from kvtier_core.proof import row_bytes_for
from kvtier_core.tier_settings import TierLimits, TierSettings
from kvtier_core.transfer.pool import Pool, PoolGeometry
from kvtier_core.values import RequestInfo, TierContext, TierInfo
from kvtier_testing.faulty import FaultyTier
from tests.sim.books import check_books

PAYLOAD = 4000
PATIENCE_S = 20.0


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def content(number: int) -> bytes:
    return bytes([number % 251 + 1]) * PAYLOAD


class Bench:
    """Drives a manager the way an engine does, with the device copies done by hand."""

    def __init__(
        self,
        num_rows: int,
        names: list[str],
        limits: Mapping[str, float],
        device_timeout_s: float,
        secrets: frozenset[str],
        info: TierInfo,
        make_port: MakePort | None,
    ) -> None:
        own = {name: value for name, value in limits.items() if name in TierLimits.model_fields}
        shared: dict[str, Any] = {name: value for name, value in limits.items() if name not in own}
        self.pool = Pool.create(PoolGeometry(num_rows=num_rows, row_bytes=row_bytes_for(PAYLOAD)))
        self.tiers: dict[str, FaultyTier] = {}
        self.prepare: Callable[[FaultyTier], None] = lambda tier: None
        namespace = Namespace(
            model="test",
            kv_dtype="float32",
            tokens_per_block=16,
            groups=(GroupSpec(layers=("0",), block_bytes=PAYLOAD),),
            layout="test",
            weights_digest="w",
        )
        builds = [
            TierBuild(
                name=name,
                identity=TierIdentity(name=name, type="faulty", distribution="test-dist", version="9.9"),
                info=info,
                limits=TierLimits.model_validate(own),
                capacity_bytes=None,
                secrets=secrets,
                make_port=make_port or partial(HookTier, self._build),
            )
            for name in names
        ]
        self.manager = TierManager(
            pool=self.pool,
            namespace=namespace,
            tiers=builds,
            policy=make_policy("lru", num_rows),
            limits=PoolLimits(
                max_promotion_rows=max(1, num_rows // 2),
                max_cascade_rows=num_rows,
                lease_timeout_s=30.0,
                device_timeout_s=device_timeout_s,
                **shared,
            ),
        )

    def _build(self, context: TierContext) -> FaultyTier:
        tier = FaultyTier(TierSettings(type="faulty"), context)
        self.tiers[context.name] = tier
        self.prepare(tier)
        return tier

    def new(self, request_id: str) -> None:
        self.manager.new_request(RequestInfo(request_id=request_id))

    def store(self, request_id: str, *numbers: int) -> None:
        """A device store, start to end."""
        prepared = self.manager.reserve_store(request_id, [key(n) for n in numbers])
        assert prepared is not None
        for held, row in zip(prepared.keys, prepared.rows, strict=True):
            self.pool.row(row)[:PAYLOAD] = content(int.from_bytes(held[:32], "big"))
        if prepared.keys:
            self.manager.commit_store(prepared.job_id, success=True)

    def lookup(self, request_id: str, *numbers: int) -> int:
        """Leading blocks loadable, once nothing is pending."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self.manager.lookup(request_id, [[key(n) for n in numbers]])
            if answer.is_settled:
                return answer.ready_tokens // 16
            assert time.monotonic() < deadline, f"still pending: {answer}"
            self.manager.end_step()
            self.manager.wait(1.0)

    def load(self, request_id: str, *numbers: int) -> list[bool]:
        """Look up and load; whether each loaded block has the right bytes."""
        hits = self.lookup(request_id, *numbers)
        prepared = self.manager.reserve_load(request_id, [key(n) for n in numbers[:hits]])
        right = [
            bytes(self.pool.row(row)[:PAYLOAD]) == content(number)
            for number, row in zip(numbers, prepared.rows, strict=False)
        ]
        if prepared.keys:
            self.manager.commit_load(prepared.job_id)
        return right

    def settle(self) -> None:
        """Wait until nothing that somebody waits for is under way."""
        self.until(lambda: not self.manager.has_pending_work)

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until *condition* holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come about"
            self.manager.end_step()
            self.manager.wait(0.2)
            check_books(self.manager.coordinator.state)

    def wait_for_event(self) -> None:
        """Wait until the tiers have reported something, without taking it in."""
        deadline = time.monotonic() + PATIENCE_S
        while self.manager._events.empty():
            assert time.monotonic() < deadline, "no tier reported anything"
            time.sleep(0.001)

    def evict_all(self) -> None:
        """Empty the pool by storing other blocks over everything, without telling any tier's keys."""
        rows = self.pool.geometry.num_rows
        self.manager.new_request(RequestInfo(request_id="evict"), store_tiers=())
        for number in range(10_000, 10_000 + rows):
            self.store("evict", number)
        self.manager.request_finished("evict")


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(
        names: list[str] | None = None,
        *,
        num_rows: int = 16,
        prepare: Callable[[FaultyTier], None] | None = None,
        device_timeout_s: float = 60.0,
        secrets: frozenset[str] = frozenset(),
        timeout_s: float = PATIENCE_S,
        info: TierInfo = FaultyTier.info,
        make_port: MakePort | None = None,
        **limits: float,
    ) -> Bench:
        bench = Bench(num_rows, names or ["one"], limits, device_timeout_s, secrets, info, make_port)
        benches.append(bench)
        if prepare is not None:
            bench.prepare = prepare
        bench.manager.open(timeout_s)
        return bench

    yield make
    for bench in benches:
        for tier in bench.tiers.values():
            tier.raise_in.clear()
            for event in tier.hang_in.values():
                event.set()
        bench.manager.shutdown(PATIENCE_S)
        bench.pool.close()
