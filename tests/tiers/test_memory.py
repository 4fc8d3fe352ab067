"""The memory tier."""

import time
from collections.abc import Mapping
from typing import Any

import pytest

from kvtier_core.values import TierContext
from kvtier_memory import MemoryTier
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import similar_keys
from kvtier_testing.tiers import TierTests


class TestMemory(TierTests):
    @pytest.fixture
    def tier_class(self) -> type[Any]:
        return MemoryTier


class TestMemoryWithOneThread(TestMemory):
    @pytest.fixture
    def tier_settings(self) -> Mapping[str, object]:
        return {"threads": 1}


class TestSlowMemory(TestMemory):
    @pytest.fixture
    def tier_settings(self) -> Mapping[str, object]:
        return {"latency": "1ms"}


def test_latency_is_added_to_every_call():
    settings = MemoryTier.Settings.model_validate({"type": "memory", "latency": "20ms"})
    tier = MemoryTier(settings, TierContext(name="m", namespace="n", row_bytes=4096))
    tier.open()
    (key,) = similar_keys(1)
    begin = time.monotonic()
    tier.store(key, memoryview(bytes(4096)))
    assert tier.contains([key]) == [True]
    assert tier.load(key, memoryview(bytearray(4096)))
    tier.delete([key])
    assert time.monotonic() - begin >= 4 * 0.020


def test_a_buffer_of_another_size_is_an_error():
    tier = MemoryTier(
        MemoryTier.Settings(type="memory"), TierContext(name="m", namespace="n", row_bytes=4096)
    )
    (key,) = similar_keys(1)
    tier.store(key, memoryview(bytes(4096)))
    with pytest.raises(ValueError, match="different structures"):
        tier.load(key, memoryview(bytearray(8192)))


def test_close_twice_frees_the_blocks():
    tier = MemoryTier(
        MemoryTier.Settings(type="memory"), TierContext(name="m", namespace="n", row_bytes=4096)
    )
    (key,) = similar_keys(1)
    tier.store(key, memoryview(bytes(4096)))
    tier.close()
    tier.close()
    assert tier.contains([key]) == [False]


def test_k11_o3_time_per_operation_does_not_grow_with_the_blocks():
    settings = MemoryTier.Settings.model_validate({"type": "memory"})

    def time_per_block(tier: TierDriver, count: int, seed: int) -> float:
        rows = dict.fromkeys(similar_keys(count, seed=seed), bytes(4096))
        begin = time.process_time()  # of the processor: others on the machine do not count
        tier.store(rows)
        tier.lookup(list(rows))
        return (time.process_time() - begin) / count

    with (
        TierDriver(MemoryTier, settings, row_bytes=4096) as empty,
        TierDriver(MemoryTier, settings, row_bytes=4096) as full,
    ):
        time_per_block(full, 20_000, 10)
        times = [
            (time_per_block(empty, 200, seed), time_per_block(full, 200, seed)) for seed in range(20, 28)
        ]
    few, many = (min(column) for column in zip(*times, strict=True))
    # Threefold is the rule; the allowance above it is for what a busy machine does to its caches.
    assert many < 3 * few + 50e-6
