"""``kvtier bench``: what it measures, what it leaves behind, and how it says that it could not."""

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvtier_core import ConfigError, KvtierError
from kvtier_testing.bench import command

pytestmark = pytest.mark.timeout(300)

TIER = """
from kvtier_core.tier import BlockTier, TierInfo, TierSettings, SupportsBatch

class Settings(TierSettings):
    fail: str = ""

BLOCKS = {}

class Tier(BlockTier):
    Settings = Settings
    info = TierInfo(medium="fake", persistent=True, bounded_by="storage")

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.blocks = BLOCKS.setdefault(context.namespace, {})
    def open(self): ...
    def contains(self, keys): return [key in self.blocks for key in keys]
    def store(self, key, block):
        if self.settings.fail == "raise":
            raise OSError("refused")
        if self.settings.fail != "lose":
            self.blocks[key] = bytes(block)
    def load(self, key, into):
        if key not in self.blocks:
            return False
        into[:] = self.blocks[key]
        return True
    def delete(self, keys):
        if self.settings.fail == "keep":
            raise OSError("refused")
        for key in keys: self.blocks.pop(key, None)
    def close(self): ...
    def remove_namespace(self): del BLOCKS[self.context.namespace]
"""


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the command on the tier ``cold``; what it prints."""

    def run(*lines: str, arguments: tuple[str, ...] = ("--json",)) -> str:
        file = tmp_path / "kvtier.toml"
        file.write_text("\n".join(["[tiers.cold]", *lines, ""]))
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        quick = ("--bytes", "1MiB", "--sizes", "128KiB", "1MiB", "--rounds", "1")
        args = parser.parse_args(["cold", "--config", str(file), *quick, *arguments])
        assert command.run(args) == 0
        return capsys.readouterr().out

    return run


def assert_measured(out: str, *others: str) -> None:
    found = json.loads(out)
    assert found["left_behind"] == {}
    ways = [f"{what}_{size}" for what in ("store", "load") for size in ("128KiB", "1MiB")]
    assert set(found["ratios"]) == {f"{way}_vs_{other}" for way in ways for other in others}
    assert all(ratio > 0 for ratio in found["ratios"].values())
    assert found["results"]["kvtier_store_128KiB"]["mb_per_s"] > 0


def test_i21_bench_of_the_memory_tier(bench):
    assert_measured(bench("type = 'memory'"), "tier alone")


@pytest.mark.parametrize("layout", ["extents", "files"])
def test_i21_bench_of_the_disk_tier_leaves_nothing(bench, tmp_path, layout):
    root = tmp_path / "root"
    root.mkdir()
    lines = (
        "type = 'disk'",
        f"root = '{root}'",
        f"layout = '{layout}'",
        "min_free = 0",
        "capacity = '256MiB'",
    )
    assert_measured(bench(*lines), "tier alone", "bare")
    assert not [path for path in tmp_path.rglob("*") if "bench" in path.name]


def test_i21_bench_of_the_fsspec_tier_for_people(bench, tmp_path):
    out = bench("type = 'fsspec'", f"url = 'file://{tmp_path}/root'", arguments=())
    assert "128KiB  store  kvtier " in out
    assert "  1MiB  load   tier alone " in out
    assert list((tmp_path / "root").iterdir()) == []


def test_i21_bench_deletes_what_it_stored(bench, install_tier):
    install_tier("fake", source=TIER)
    assert_measured(bench("type = 'fake'"), "tier alone")
    assert sys.modules["kvtier_fake_module"].BLOCKS == {}


def test_i21_a_tier_without_room_is_not_measured(bench):
    with pytest.raises(
        ConfigError, match=r"tiers.cold.capacity = 1.5 MiB has no room for two passes of 1.0 MiB"
    ):
        bench("type = 'memory'", "capacity = '1536KiB'")


@pytest.mark.parametrize("fail", ["lose", "raise", "keep"])
def test_i21_blocks_that_do_not_come_back_are_no_measure(bench, install_tier, fail):
    install_tier("fake", source=TIER)
    said = r"0 of \d blocks were (loaded|stored)|tier 'cold' could not be measured: OSError: refused"
    with pytest.raises(KvtierError, match=said):
        bench("type = 'fake'", f"fail = '{fail}'")


def test_i21_bench_draws_what_it_measured(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="kvtier-testing[svg] is not installed here")
    root = tmp_path / "root"
    root.mkdir()
    lines = ("type = 'disk'", f"root = '{root}'", "min_free = 0", "capacity = '256MiB'")
    out = bench(*lines, arguments=("--json", "--svg", str(tmp_path / "out.svg")))
    assert_measured(out, "tier alone", "bare")
    picture = ET.parse(tmp_path / "out.svg").getroot()
    assert picture.tag.endswith("}svg")
    shown = [element.text for element in picture.iter() if element.text and element.text.strip()]
    medians = json.loads(out)["results"]
    assert {"Tier cold: 1.0 MiB a pass, median and range of 1", "store, MB/s", "load, MB/s"} <= set(shown)
    assert {"kvtier", "tier alone", "bare", "128KiB", "1MiB"} <= set(shown)
    bars = [found["mb_per_s"] for name, found in medians.items() if not name.startswith("bare")]
    numbers = [int(text) for text in shown if text.isdigit()]
    assert len(bars) == 8
    assert all(min(abs(bar - number) for number in numbers) < 1 for bar in bars)


def test_i21_bench_without_a_library_that_draws_measures_nothing(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier-testing\[svg\]'"):
        bench("type = 'memory'", arguments=("--svg", str(tmp_path / "out.svg")))


def test_i21_bench_without_a_place_for_its_picture_measures_nothing(bench, tmp_path):
    with pytest.raises(ConfigError, match=f"there is no directory {tmp_path / 'absent'}"):
        bench("type = 'memory'", arguments=("--svg", str(tmp_path / "absent/out.svg")))


def test_i21_the_file_beside_a_tier_is_not_in_its_directory(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    settings = argparse.Namespace(root=Path(root))
    assert command._place_beside(settings) == tmp_path
    assert command._place_beside(argparse.Namespace(url="s3://bucket/blocks")) is None
    assert command._place_beside(argparse.Namespace()) is None
