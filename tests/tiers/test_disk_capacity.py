"""The capacity of a root holds where what is no block counts: many namespaces, an index made anew or shrunk (C13)."""

from pathlib import Path

from kvtier.main import main
from kvtier_core.keys import OffloadKey
from kvtier_core.values import TierContext
from kvtier_disk import DiskTier
from kvtier_disk.extents.index import Index
from kvtier_testing.rows import RowMaker
from tests.tiers.extents import KEYS, MIB, index_file, settings, used_bytes

MANY = [OffloadKey(key[:-4] + number.to_bytes(4)) for number, key in enumerate(KEYS * 35)]


def small_rows(root: Path, namespace: str, capacity: int) -> tuple[DiskTier, RowMaker]:
    maker = RowMaker(namespace, 4000)
    description = {"layers": "x" * 8000}
    context = TierContext(
        name="disk",
        namespace=namespace,
        row_bytes=maker.row_bytes,
        capacity_bytes=capacity,
        description=description,
    )
    tier = DiskTier(settings(root, extent_size="1MiB"), context)
    tier.open()
    return tier, maker


def test_c13_capacity_holds_with_many_namespaces_open(tmp_path):
    capacity = 2 * MIB
    opened = []
    for number in range(40):
        opened.append(small_rows(tmp_path, f"n{number}", capacity))
        assert used_bytes(tmp_path) <= capacity, number
    for tier, maker in opened * 3:
        keys = KEYS[20:60]
        assert set(tier.store_many(keys, [memoryview(maker.make(key)) for key in keys])) == {True}
        assert used_bytes(tmp_path) <= capacity
    for tier, _ in opened:
        tier.close()


def test_c13_capacity_holds_and_blocks_are_kept_when_it_shrinks_to_the_size_of_the_index(tmp_path):
    tier, maker = small_rows(tmp_path, "ns", 64 * MIB)
    made = [memoryview(maker.make(key)) for key in MANY]
    assert set(tier.store_many(MANY, made)) == {True}
    tier.close()
    assert index_file(tmp_path).stat().st_size > 3 * MIB // 4
    for capacity in (19 * MIB // 10, 24 * MIB, 19 * MIB // 10):
        tier, _ = small_rows(tmp_path, "ns", capacity)
        tier.follow()
        assert used_bytes(tmp_path) <= capacity
        assert sum(tier.contains(MANY)) > 60
        assert set(tier.store_many(MANY[:1000], made[:1000])) == {True}
        assert used_bytes(tmp_path) <= capacity
        tier.close()


def test_c13_capacity_holds_while_an_index_is_made_anew(tmp_path, monkeypatch):
    capacity = 16 * MIB
    tier, maker = small_rows(tmp_path, "ns", capacity)
    assert set(tier.store_many(MANY[:4000], [memoryview(maker.make(key)) for key in MANY[:4000]])) == {True}
    tier.close()
    most = [used_bytes(tmp_path)]
    adopt_extent = Index.adopt_extent

    def adopt_and_look(index: Index, *arguments) -> None:
        adopt_extent(index, *arguments)
        most.append(used_bytes(tmp_path))

    monkeypatch.setattr(Index, "adopt_extent", adopt_and_look)
    assert main(["disk", "rebuild", str(tmp_path)]) == 0
    assert 0.8 * capacity < max(most) <= capacity
