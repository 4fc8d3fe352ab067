"""Of a chain the tail leaves before the head, in the pool and in every tier, however its blocks came (C14).

Real managers, pools and tiers: only the engine's own bytes are missing.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier_core import load_settings
from kvtier_core.engine import open_manager, plan_geometry
from kvtier_core.keys import OffloadKey, make_offload_key
from kvtier_core.manager import TierManager
from kvtier_core.namespace import GroupSpec, Namespace
from kvtier_core.tier import RequestInfo
from kvtier_core.transfer import Pool
from kvtier_disk.extents.bounds import Bounds, shape_for
from kvtier_disk.extents.census import BASE_BYTES, SLOT_BYTES
from tests.manager.conftest import PATIENCE_S

ROW = 4096
PIECE = 16
POLICIES = ("lru", "arc", "s3fifo")
TIERS = ("memory", "files", "extents", "fsspec")


def prompt(name: str, blocks: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}-{number}".encode().rjust(32, b"."), 0) for number in range(blocks)]


class Engine:
    """An engine without a device, which hands its blocks over in pieces."""

    def __init__(self, manager: TierManager) -> None:
        self.manager = manager
        self.requests = 0

    def begin(self) -> str:
        self.requests += 1
        name = f"r{self.requests}"
        self.manager.new_request(RequestInfo(request_id=name))
        return name

    def store(self, request: str, keys: Sequence[OffloadKey]) -> None:
        for begin in range(0, len(keys), PIECE):
            prepared = self.manager.reserve_store(request, keys[begin : begin + PIECE])
            assert prepared is not None, "no room in the pool"
            if prepared.keys:
                self.manager.commit_store(prepared.job_id, success=True)
            self.manager.end_step()
            self.settle()

    def settle(self) -> None:
        while self.manager.has_pending_work:
            self.manager.wait(PATIENCE_S)
        for port in self.manager._tiers.ports.values():  # uses are no work that anybody waits for
            has_caught_up = threading.Event()
            port._calls.put(has_caught_up.set)
            assert has_caught_up.wait(PATIENCE_S)

    def write(self, keys: Sequence[OffloadKey]) -> None:
        request = self.begin()
        self.store(request, keys)
        self.manager.request_finished(request)

    def hits(self, keys: Sequence[OffloadKey]) -> int:
        """The blocks of the prompt that can be loaded, once every tier has spoken."""
        request = self.begin()
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.manager.lookup(request, [keys])).is_settled:
            assert time.monotonic() < deadline, found
            self.manager.end_step()
            self.manager.wait(0.05)
        self.manager.request_finished(request)
        return found.ready_tokens // 16

    def hits_in_tier(self, keys: Sequence[OffloadKey]) -> int:
        """The blocks of the prompt that the tier brings back into an empty pool."""
        self.manager.reset_cache()
        return self.hits(keys)


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    opened: list[tuple[TierManager, Pool]] = []

    def make(tier: str | None = None, *, pool: int = 64, room: int = 10, policy: str = "lru") -> Engine:
        settings = load_settings(
            overrides={
                "pool": {
                    "capacity": pool * ROW,
                    "policy": policy,
                    "prefault": False,
                    "max_promotion": 0.75,
                },
                "tiers": {} if tier is None else {"cold": {**tier_settings(tier, room), "policy": policy}},
                "on_reset": "pool",
                "lookup_order": [] if tier is None else ["cold"],
            },
            environ={},
        )
        namespace = Namespace(
            model="test",
            kv_dtype="float32",
            tokens_per_block=16,
            groups=(GroupSpec(layers=("0",), block_bytes=512),),
            layout="test",
            weights_digest="w",
        )
        memory = Pool.create(plan_geometry(settings, namespace))
        manager = open_manager(settings, namespace, memory)
        opened.append((manager, memory))
        return Engine(manager)

    def tier_settings(tier: str, room: int) -> dict[str, object]:
        match tier:
            case "memory":
                return {"type": "memory", "capacity": room * ROW}
            case "files":
                return {
                    "type": "disk",
                    "layout": "files",
                    "root": tmp_path / "files",
                    "min_free": 0,
                    "capacity": room * ROW,
                }
            case "fsspec":
                return {"type": "fsspec", "url": f"file://{tmp_path}/objects", "capacity": room * ROW}
            case _:
                return {
                    "type": "disk",
                    "root": tmp_path / "extents",
                    "min_free": 0,
                    "capacity": capacity_in_extents(room),
                }

    yield make
    for manager, memory in opened:
        assert manager.shutdown(PATIENCE_S)
        memory.close()


def capacity_in_extents(blocks: int) -> int:
    """The smallest capacity with which a root keeps so many blocks, in extents of an eighth of it."""
    journal = 256 << 10
    beside = BASE_BYTES + journal
    for capacity in itertools.count(beside + blocks * ROW, ROW):
        bounds = Bounds(capacity=capacity, min_free=0, extent_bytes=1 << 30, ttl=None)
        shape = shape_for(ROW, bounds, journal, held=0, disk_bytes=1 << 40)
        extents = (capacity - beside) // (shape.file_bytes + shape.slots * SLOT_BYTES)
        if extents * shape.slots >= blocks:
            return capacity
    raise AssertionError


@pytest.mark.parametrize("policy", POLICIES)
def test_r3_the_pool_keeps_the_head_of_a_prompt_that_nobody_has_read_yet(make_engine, policy):
    engine = make_engine(pool=1000, policy=policy)
    first = prompt("first", 500)
    engine.write(first)
    engine.write(prompt("second", 600))
    assert engine.hits(first) >= 394


@pytest.mark.parametrize("policy", POLICIES)
def test_r3_the_pool_keeps_heads_of_requests_that_never_end(make_engine, policy):
    engine = make_engine(pool=1000, policy=policy)
    first, second = prompt("first", 500), prompt("second", 600)
    engine.store(engine.begin(), first)
    engine.store(engine.begin(), second)
    assert engine.hits(first) >= 394


@pytest.mark.parametrize("policy", POLICIES)
def test_r3_prompts_that_come_piece_by_piece_in_turn_keep_their_heads(make_engine, policy):
    engine = make_engine(pool=1000, policy=policy)
    prompts = [prompt("first", 550), prompt("second", 550)]
    requests = [engine.begin(), engine.begin()]
    for begin in range(0, 550, PIECE):
        for request, keys in zip(requests, prompts, strict=True):
            engine.store(request, keys[begin : begin + PIECE])
    found = [engine.hits(keys) for keys in prompts]
    assert sum(found) >= 1000 - PIECE * 2
    assert min(found) >= 440


@pytest.mark.parametrize("policy", POLICIES)
def test_r3_a_prompt_larger_than_the_pool_keeps_its_head(make_engine, policy):
    engine = make_engine(pool=100, policy=policy)
    engine.write(prompt("old", 50))
    large = prompt("large", 250)
    engine.write(large)
    assert engine.hits(large) >= 100 - PIECE


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_b1_a_tier_keeps_the_head_of_the_older_prompt(make_engine, tier, policy):
    engine = make_engine(tier, room=10, policy=policy)
    older = prompt("older", 8)
    engine.write(older)
    engine.write(prompt("newer", 4))
    assert engine.hits_in_tier(older) >= 6


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_r3_b1_a_tier_keeps_the_head_of_a_prompt_that_nobody_has_read_yet(make_engine, tier, policy):
    engine = make_engine(tier, pool=1200, room=1000, policy=policy)
    first = prompt("first", 500)
    engine.write(first)
    engine.write(prompt("second", 600))
    assert 394 <= engine.hits_in_tier(first) < 500


@pytest.mark.parametrize("tier", TIERS)
def test_b1_a_prompt_larger_than_the_tier_keeps_its_head_while_it_is_written(make_engine, tier):
    engine = make_engine(tier, pool=200, room=64)
    large = prompt("large", 160)
    engine.store(engine.begin(), large)
    assert engine.hits_in_tier(large) >= 64 - 2 * PIECE


@pytest.mark.parametrize("tier", TIERS)
def test_b1_requests_in_turn_that_never_end_keep_their_heads_in_a_tier(make_engine, tier):
    engine = make_engine(tier, pool=200, room=64)
    prompts = [prompt("first", 48), prompt("second", 48)]
    requests = [engine.begin(), engine.begin()]
    for begin in range(0, 48, PIECE):
        for request, keys in zip(requests, prompts, strict=True):
            engine.store(request, keys[begin : begin + PIECE])
    found = [engine.hits_in_tier(keys) for keys in prompts]
    assert min(found) >= PIECE // 2  # where the room goes beyond is up to who comes next


@pytest.mark.parametrize("tier", TIERS)
def test_b1_what_a_request_read_from_the_pool_stays_in_the_tier_with_what_it_adds(make_engine, tier):
    engine = make_engine(tier, pool=200, room=64)
    shared, own = prompt("shared", 32), prompt("own", 48)
    engine.write(shared)
    reader = engine.begin()
    assert engine.manager.lookup(reader, [shared]).ready_tokens == 32 * 16
    engine.manager.commit_load(engine.manager.reserve_load(reader, shared).job_id)
    engine.settle()
    engine.store(reader, own)
    assert engine.hits_in_tier([*shared, *own]) >= 64 - 2 * PIECE
