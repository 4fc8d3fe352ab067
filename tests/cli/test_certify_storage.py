"""The storage that ``kvtier certify`` gives the tiers: places of their own, and rows that change places."""

from pathlib import Path

import pytest

from kvtier.certify.storage import Storage, find_rows
from kvtier_core import ConfigError, load_settings
from kvtier_testing.rows import RowMaker, similar_keys


@pytest.fixture
def settings(tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text(f'[tiers.cold]\ntype = "disk"\nroot = "{tmp_path}/precious"\n')
    return load_settings(file=file, environ={})


@pytest.fixture
def place(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    return place


@pytest.fixture
def storage(settings, place):
    return Storage(place, settings)


def write_rows(storage, namespace, keys, *, name="blocks.ext"):
    """A file that begins with something else, and rows after it."""
    maker = RowMaker(namespace, 9000)
    root = Path(storage.overrides["tiers"]["cold"]["root"])
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(bytes(4096) + b"".join(maker.make(key) for key in keys))
    return maker, root / name


def rows_of(file, maker):
    content = file.read_bytes()[4096:]
    return [content[at : at + maker.row_bytes] for at in range(0, len(content), maker.row_bytes)]


def test_each_tier_gets_storage_of_its_own(storage, settings, place):
    moved = load_settings(file=settings.file, overrides=storage.overrides, environ={})
    assert moved.tiers["cold"].model_dump()["root"] == place / "tiers" / "cold"
    assert storage.lasting == ["cold"]


def test_where_no_tier_is_configured_there_is_one_on_disk(place):
    storage = Storage(place, load_settings(environ={}))
    moved = load_settings(overrides=storage.overrides, environ={})
    assert moved.tiers["disk"].model_dump()["root"] == place / "tiers" / "disk"
    assert storage.lasting == ["disk"]


def test_fr2_storage_of_our_own_takes_every_block_at_once_and_keeps_it(place, tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text(
        f'[tiers.cold]\ntype = "disk"\nroot = "{tmp_path}/precious"\nread_only = true\nttl = "1s"\n'
        '[tiers.far]\ntype = "fsspec"\nurl = "memory://bucket"\npublish = "put"\nstore_threshold = 2\n'
        "[pool]\nstore_threshold = 3\n"
    )
    overrides = Storage(place, load_settings(file=file, environ={})).overrides
    environ = {"KVTIER_TIERS__COLD__READ_ONLY": "true"}
    moved = load_settings(file=file, overrides=overrides, environ=environ)
    cold, far = (moved.tiers[name].model_dump() for name in ("cold", "far"))
    assert (cold["read_only"], cold["ttl"]) == (False, None)
    assert (far["publish"], far["store_threshold"]) == ("auto", 1)
    assert moved.pool.store_threshold == 1
    assert not (tmp_path / "precious").exists()


LASTING = """
from kvtier_core.tier import BlockTier, TierInfo, TierSettings

class Tier(BlockTier):
    Settings = TierSettings
    info = TierInfo(medium="tape", default_capacity=8 << 20, persistent=True)
    def open(self): ...
    def contains(self, keys): return [False] * len(keys)
    def store(self, key, block): ...
    def load(self, key, into): return False
    def delete(self, keys): ...
    def close(self): ...
    def scan(self): return []
"""


def test_a_lasting_tier_that_cannot_be_moved_is_refused(place, tmp_path, install_tier):
    install_tier("tape", source=LASTING)
    file = tmp_path / "kvtier.toml"
    file.write_text("[tiers.cold]\ntype = 'tape'\n")
    with pytest.raises(ConfigError, match=r"tiers\.cold .*can't keep its blocks in a directory"):
        Storage(place, load_settings(file=file, environ={}))


@pytest.mark.parametrize(
    "lines",
    [
        "type = 'valkey'\nurl = 'redis://127.0.0.1:1'",
        "type = 'mooncake'\nmaster_server_address = '127.0.0.1:1'",
    ],
)
def test_i19_a_tier_on_a_server_is_refused(place, tmp_path, lines):
    file = tmp_path / "kvtier.toml"
    file.write_text(f"[tiers.far]\n{lines}\n")
    with pytest.raises(ConfigError, match=r"tiers\.far .*can't keep its blocks in a directory"):
        Storage(place, load_settings(file=file, environ={}))


def test_i18_a_bucket_that_compresses_is_certified_in_a_directory(place, tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text('[tiers.far]\ntype = "fsspec"\nurl = "s3://bucket/kv"\ncompression = "zstd"\n')
    storage = Storage(place, load_settings(file=file, environ={}))
    moved = load_settings(file=file, overrides=storage.overrides, environ={})
    assert moved.tiers["far"].model_dump()["url"] == (place / "tiers" / "far").as_uri()


def test_rows_are_found_by_their_proofs(storage, place):
    keys = similar_keys(5)
    maker, file = write_rows(storage, "one", keys)
    found = list(find_rows(place))
    assert [row.start for row in found] == [4096 + index * maker.row_bytes for index in range(5)]
    assert [row.read() for row in found] == [maker.make(key) for key in keys]
    assert {row.path for row in found} == {file}


def test_rows_in_the_middle_change_places(storage):
    keys = similar_keys(6)
    maker, file = write_rows(storage, "one", keys)
    assert storage.swap_rows() == 2
    assert rows_of(file, maker) == [maker.make(keys[index]) for index in (0, 1, 3, 2, 4, 5)]


def test_rows_of_another_namespace_take_the_place_of_those_of_the_same_keys(storage):
    keys = similar_keys(6)
    maker, file = write_rows(storage, "one", keys)
    storage.save("before")
    other, _ = write_rows(storage, "two", list(reversed(keys)), name="other.ext")
    assert storage.put_others_rows("before") == 2
    expected = [maker.make(key) for key in keys]
    expected[2:4] = [other.make(key) for key in keys[2:4]]
    assert rows_of(file, maker) == expected
    storage.restore("before")
    assert rows_of(file, maker) == [maker.make(key) for key in keys]
