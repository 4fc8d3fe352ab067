"""What a run of ``benchmarks/peers.py`` becomes: ratios, and a page that hides nothing in which kvtier loses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kvtier_transformers")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # its programs import each other from there
import peers
import peers_page


def sample(**seconds: float) -> dict[str, float]:
    return {"tokens": 3841, **{f"{place}_s": value for place, value in seconds.items()}}


def way(disk_bytes: int = 1 << 20, **seconds: float) -> dict[str, Any]:
    return {
        "samples": [sample(**seconds)] * 3,
        "pss_bytes": 3 << 30,
        "disk_bytes": disk_bytes,
        "kv_bytes": 1 << 20,
        "start_s": 20.0,
    }


@pytest.fixture
def run() -> dict[str, Any]:
    raw = {
        "reload": {
            "kvtier": way(cold=9, host=0.03, left=0.10, dropped=0.12, disk_bytes=4 << 20),
            "lmcache_fs": way(cold=9, host=0.08, left=0.20, dropped=0.30),
            "lmcache_fs_native": way(cold=9, host=0.10, left=0.13, dropped=0.24),
            "vllm_fs": way(cold=9, host=0.02, left=0.08, dropped=0.20),
            "lifeboat": way(cold=9, host=0.777, left=0.777, dropped=0.777),
        },
        "floor": {"1281": [0.03], "3841": [0.10, 0.18, 0.12]},
        "conversations": {
            name: {"rounds": [rate] * 3, "pss_bytes": 1, "disk_bytes": 1}
            for name, rate in {"kvtier": 1200.0, "lmcache_fs": 900.0, "lmcache_in_process": 1000.0}.items()
        },
        "faults": {
            "kvtier": {"killed": {"answers": 6, "wrong": 0, "loaded": 2}},
            "lmcache_fs": {
                "killed": {"answers": 6, "wrong": 5, "loaded": 6},
                "limit": {"failed": "it has none"},
            },
        },
    }
    return {
        **peers.summarize(raw),
        "peers": {"kvtier": "1", "lmcache": "2", "lifeboatcache": "3"},
        "absent": {"vllm_fs": "it did not start"},
        "notes": {"lmcache_fs": "a note"},
        "machine": peers.machine("float32", 2),
        "raw": raw,
    }


def test_ratios_are_against_the_best_of_theirs(run):
    assert run["ratios"] == {
        "host_3841_vs_lmcache": pytest.approx(0.03 / 0.08, abs=1e-3),
        "disk_3841_vs_lmcache": 0.5,
        "warm_files_3841_vs_best": 1.25,
        "conversations_vs_lmcache": 1.2,
    }
    assert run["wrong"] == {"kvtier": {"killed": 0}, "lmcache_fs": {"killed": 5}}


def test_conversations_without_store_or_load_are_told(run):
    run["raw"]["conversations"]["none"] = {"rounds": [1050.0] * 3, "pss_bytes": 1, "disk_bytes": 0}
    run |= peers.summarize(run["raw"])
    assert run["ratios"]["conversations_vs_lmcache"] == 1.2
    assert run["floor"]["conversations_vs_lmcache"] == 1.05
    assert "over the best of LMCache: 1.05." in peers_page.page(run)


def test_the_floor_is_told_beside_the_ratios_and_over_the_best_of_lmcache(run):
    assert run["floor"]["floor_s"]["3841"]["median"] == 0.12
    assert run["floor"]["disk_3841_vs_lmcache"] == 0.5
    page = peers_page.page(run)
    assert "3,841 tokens: as many bytes read past the page cache and then copied once took 0.120 s" in page
    assert "from disk, page cache dropped: 0.50." in page


def test_a_way_that_gave_no_figures_has_no_ratio():
    assert peers.summarize({"reload": {"kvtier": way(cold=9, host=0.03)}})["ratios"] == {}


@pytest.mark.parametrize(
    ("ours", "theirs"), [(-0.001, 0.08), (0.03, -0.002), (-0.001, -0.002), (0.0, 0.08), (0.03, 0.0)]
)
def test_an_excess_that_is_noise_has_no_ratio_and_meets_no_aim(run, ours, theirs):
    raw = {
        "reload": {"kvtier": way(host=ours, dropped=0.1), "lmcache_fs": way(host=theirs, dropped=theirs)},
        "floor": {"3841": [0.10]},
    }
    run |= peers.summarize(raw)
    assert run["ratios"]["host_3841_vs_lmcache"] is None
    assert (run["floor"]["disk_3841_vs_lmcache"] is None) == (theirs <= 0)
    page = peers_page.page(json.loads(json.dumps(run)))
    assert "| not measurable | ≤ 0.6 | not measurable |" in page
    assert ("page cache dropped: not measurable." in page) == (theirs <= 0)


def test_the_page_says_where_kvtier_loses_and_what_is_missing(run):
    page = peers_page.page(run)
    losses = page.partition("## Where kvtier loses")[2].partition("##")[0]
    assert "disk, files as left, 3,841 tokens: vLLM tiering, `fs` 0.080, kvtier 0.100" in losses
    assert "host memory, 3,841 tokens: vLLM tiering, `fs` 0.020" in losses
    assert "bytes on disk, MiB: LMCache server, `fs` 1, kvtier 4" in losses
    assert "conversations" not in losses
    assert "| 1.25 | ≤ 1.0 | **no** |" in page
    assert "it did not start" in page
    assert "**5 of 6 (6)**" in page
    assert all(len(line) <= 120 for line in page.splitlines() if not line.startswith("|"))


def test_the_page_has_no_figures_of_what_nothing_allows_to_publish(run):
    page = peers_page.page(run)
    assert "0.777" not in page
    assert "**lifeboatcache**: it is proprietary" in page


def test_the_page_is_made_from_what_is_printed(run, tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text(f"said before\n{json.dumps(run)}\n")
    monkeypatch.setattr(peers_page, "PAGE", tmp_path / "peers.md")
    monkeypatch.setattr("sys.argv", ["peers_page.py", str(tmp_path / "run.json")])
    peers_page.main()
    assert (tmp_path / "peers.md").read_text() == peers_page.page(run)


def test_a_later_run_replaces_the_parts_that_it_has(run):
    later = {**run, "raw": {"reload": {"kvtier": way(host=0.04), "lmcache_fs": way(host=0.08)}}}
    merged = peers_page.merged([run, later])
    assert merged["ratios"] == {"host_3841_vs_lmcache": 0.5, "conversations_vs_lmcache": 1.2}
    assert merged["wrong"] == run["wrong"]
