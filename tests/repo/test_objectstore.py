"""The programs about the object store: what a run becomes as a page, what whole packs lose, and what packing gains."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kvtier_fsspec")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # its programs import each other from there
import objectstore_compression
import objectstore_model
import objectstore_page
import objectstore_waste


@pytest.fixture
def result() -> dict[str, Any]:
    ratios = {
        f"{cpu}{what}_{size}_vs_obstore": 0.5 if cpu else 2.0
        for size in ("128KiB", "8MiB")
        for what in ("store", "load")
        for cpu in ("", "cpu_")
    }
    one = {"mb_per_s": 100.0, "cpu_s_per_gib": 1.26}
    return {
        "date": "2026-11-30",
        "command": "--json",
        "sizes": ["128KiB", "8MiB"],
        "threads": 16,
        "cores": 2,
        "load": 0.5,
        "ratios": ratios | dict.fromkeys(objectstore_page.LOOKUPS, 0.1),
        "results": {f"{name}_{what}_8MiB": one for name in ("ours", "obstore") for what in ("store", "load")},
        "compression": {},
    }


def test_i18_the_page_says_which_aims_are_met(result, tmp_path, monkeypatch):
    result["ratios"]["cpu_load_8MiB_vs_obstore"] = 1.4
    result["ratios"]["lookup_1000_absent_20ms_not_followed_s"] = 0.3
    page = objectstore_page.page(result).splitlines()
    assert "| store 128 KiB, rate | 2.00 | ≥ 3 | **no** |" in page
    assert "| store 8 MiB, rate | 2.00 | ≥ 0.9 | yes |" in page
    assert "| load 8 MiB, CPU time | 1.40 | ≤ 1.3 | **no** |" in page
    assert "| absent, with opening the tier | 3.39 s | 0.3000 s | ≤ 0.2 s | **no** |" in page
    assert "| 8 MiB | kvtier | 100 (1.3) | 100 (1.3) |" in page
    assert not any("s3fs |" in line or "## Compression" in line for line in page)
    assert max(len(line) for line in page) <= 120
    assert not any("machine was busy" in line for line in page)
    assert "machine was busy" in objectstore_page.page(result | {"load": 2.5})


def test_i18_the_page_shows_when_compression_pays(result):
    pytest.importorskip("zstandard")
    (name, blocks), *_ = objectstore_compression.normal_blocks(2)
    result["compression"] = {name: objectstore_compression.measure(blocks, 1)}
    assert result["compression"][name]["smaller_by"] > 1.3
    (line,) = [line for line in objectstore_page.page(result).splitlines() if name in line]
    assert line.startswith("| normal bfloat16 | 1.4")
    assert line.endswith(" MB/s |")


def test_i18_packs_lose_few_hits_and_the_same_seed_says_so_again():
    packs, again, single = (
        objectstore_waste.run(seed=3, engines=4, rounds=60, capacity=256 << 20, most=most)
        for most in (64, 64, 1)
    )
    assert packs == again
    assert 0 < single["hit_rate"] <= single["ideal_hit_rate"] < 1
    assert packs["hit_rate"] > single["hit_rate"] - 0.1
    assert packs["copies"] >= 0 == single["copies"]


def test_i18_the_model_of_costs_has_every_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["objectstore_model.py", "--blocks", "100000"])
    objectstore_model.main()
    printed = capsys.readouterr().out
    for what in ("packs", "PUT a second", "memory of an engine's table", "cost a month"):
        assert f"| {what} |" in printed
