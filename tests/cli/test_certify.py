"""What ``kvtier certify`` decides, tried without a real engine: cuts, verdicts, damaged rows, exit status."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.certify.document import least_tokens, make_document
from kvtier.certify.scenarios import SCENARIOS
from kvtier.certify.storage import Storage, find_rows
from kvtier.certify.verdicts import Row, difference, judge, make_reference, why_not_certified
from kvtier.main import main
from kvtier_core import ConfigError, load_settings
from kvtier_testing.rows import RowMaker, similar_keys
from tests.tiers.small_disk import run_on

BLOCK, VOCAB = 16, 50


def logs(seed, *, shift=0.0):
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) + np.float32(shift)


def reference(*, noise=0.0, control=1.0):
    document = make_document(133, BLOCK, VOCAB)
    right = {cut: logs(cut) for cut in document.cuts}
    late = [cut for cut in document.cuts if document.restorable(cut)]
    return make_reference(
        document,
        right,
        {cut: right[cut] + np.float32(noise) for cut in late},
        {cut: right[cut] + np.float32(control) for cut in late},
    )


def answers(of, *, restored=None, wrong=()):
    return {
        cut: (right + np.float32(0.5 if cut in wrong else 0), {"disk": 16} if restored is None else restored)
        for cut, right in of.answers.items()
    }


def test_a_document_is_cut_around_the_ends_of_blocks_and_behind_the_last():
    document = make_document(133, BLOCK, VOCAB)
    assert document.cuts == [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 133]
    assert [document.restorable(cut) for cut in (15, 16, 17, 128, 129)] == [0, 0, 16, 112, 128]
    assert len(document.token_ids) == 133
    assert make_document(133, BLOCK, VOCAB) == document
    assert max(document.token_ids) < VOCAB


def test_the_shortest_document_has_two_blocks():
    document = make_document(least_tokens(BLOCK), BLOCK, VOCAB)
    assert document.restorable(document.cuts[-1]) == 2 * BLOCK


def test_another_block_differs_in_that_block_alone():
    document = make_document(133, BLOCK, VOCAB)
    other = document.with_other_block(65)
    differ = {
        index for index, (one, two) in enumerate(zip(document.token_ids, other, strict=False)) if one != two
    }
    assert len(other) == 65
    assert differ
    assert differ <= set(range(48, 64))


def test_the_difference_is_the_largest_and_what_is_no_number_is_infinite():
    one = logs(0)
    other = one.copy()
    other[7] += 2
    assert difference(one, one) == 0
    assert difference(one, other) == pytest.approx(2)
    assert difference(one, one[1:]) == float("inf")
    other[3] = np.nan
    assert difference(one, other) == float("inf")
    masked = one.copy()
    masked[0] = -np.inf
    assert difference(masked, masked) == 0
    assert difference(masked, one) == float("inf")


def test_the_tolerance_is_four_times_the_noise_and_not_less_than_that_of_fp32():
    assert reference().tolerance == 1e-3
    assert reference(noise=0.01).tolerance == pytest.approx(0.04, rel=1e-4)


def test_answers_that_wrong_kv_does_not_change_show_nothing():
    assert reference(noise=0.01, control=0.05).can_tell
    assert not reference(noise=0.01, control=0.03).can_tell


def test_right_answers_with_something_restored_pass():
    right = reference()
    row = judge("pool", right, answers(right))
    assert (row.verdict, row.why, row.difference) == ("pass", "", 0)
    assert row.restored == {"disk": 16 * 14}


def test_a_wrong_answer_fails_and_the_first_is_named():
    right = reference()
    row = judge("restart", right, answers(right, wrong=(65, 129)))
    assert row.verdict == "FAIL"
    assert row.why == "first wrong after 65 tokens, by 0.5: 16 from disk restored, in blocks of 16"
    assert row.difference == pytest.approx(0.5)


def test_nothing_restored_fails_where_something_had_to_be():
    right = reference()
    nothing = answers(right, restored={})
    assert judge("pool", right, nothing).why == "not certified: nothing was restored"
    assert judge("kill", right, nothing, "anything").verdict == "pass"
    assert judge("rope", right, nothing, "nothing").verdict == "pass"
    assert judge("rope", right, answers(right), "nothing").verdict == "FAIL"


def test_fr1_what_only_later_prompts_restore_may_come_from_the_scenario_itself():
    right = reference()
    first, *later = answers(right).items()
    row = judge("restart", right, dict([(first[0], (first[1][0], {})), *later]))
    assert (row.verdict, row.why) == ("FAIL", "not certified: nothing was restored")
    assert row.restored_tokens


def test_what_restored_nothing_at_all_is_not_certified():
    passed = Row(scenario="kill", verdict="pass", restored={"pool": 16})
    empty = Row(scenario="empty tiers", verdict="pass", restored={})
    failed = Row(scenario="restart", verdict="FAIL", why="wrong")
    assert why_not_certified([passed, empty]) is None
    assert why_not_certified([empty]) == "not certified: nothing was restored"
    assert why_not_certified([passed, failed]) == "not certified: 1 of 2 scenarios failed (restart)"


# -- storage


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
    assert storage.lasts


def test_where_no_tier_is_configured_there_is_one_on_disk(place):
    storage = Storage(place, load_settings(environ={}))
    moved = load_settings(overrides=storage.overrides, environ={})
    assert moved.tiers["disk"].model_dump()["root"] == place / "tiers" / "disk"
    assert storage.lasts


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
    with pytest.raises(ConfigError, match=r"tiers\.cold .*no setting root or url"):
        Storage(place, load_settings(file=file, environ={}))


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


# -- the command, with an engine that only seems to keep something

FAKE = """
    import os
    import signal
    from pathlib import Path
    import numpy as np
    from kvtier_core import PoolError, UnsupportedModelError

    class Engine:
        tokens_per_block, vocab_size, dtype = 16, 50, "float32"
        known = set()

        def __init__(self, opening):
            self.opening = opening

        def ask(self, token_ids, first=0):
            if os.environ.get("FAKE") == "hangs":
                Path(os.environ["FAKE_PID"]).write_text(f"{os.getpid()}\\n")
                signal.pause()
            if os.environ.get("FAKE") == "dies" and self.opening.has_kvtier:
                os.abort()
            if os.environ.get("FAKE") == "fails" and self.opening.has_kvtier:
                raise PoolError("no room")
            seed = hash(tuple(token_ids)) % 2**32
            answer = np.random.default_rng(seed).normal(size=50).astype(np.float32)
            whole = {tuple(token_ids[:end]) for end in range(16, len(token_ids), 16)}
            restored = len(whole & self.known) * 16 if self.opening.has_kvtier else 0
            self.known |= whole
            if restored and os.environ.get("FAKE") == "wrong":
                answer = answer + np.float32(1)
            return answer, {"pool": restored} if restored and os.environ.get("FAKE") != "nothing" else {}

        def settle(self, timeout_s):
            return True

        def forget_device(self): ...
        def close(self): ...

    def open_engine(opening):
        if os.environ.get("FAKE") == "refused":
            raise UnsupportedModelError("no such layers")
        print("noise on stdout")
        return Engine(opening)
"""


@pytest.fixture
def fake(site, monkeypatch, tmp_path):
    """Arguments that certify it; ``FAKE`` in the environment says how it misbehaves."""
    modules = {"fake_engine": textwrap.dedent(FAKE)}
    site.install("fake-engine", {"kvtier.certify.v1": {"fake": "fake_engine:open_engine"}}, modules)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(site.path), *filter(None, sys.path)]))
    (tmp_path / "model").mkdir()
    return [
        "certify",
        "--engine",
        "fake",
        "--model",
        str(tmp_path / "model"),
        "--tokens",
        "69",
        "--only",
        "tp2",
    ]


def certify(arguments, capsys):
    """The exit status, and the report."""
    status = main([*arguments, "--json"])
    lines = capsys.readouterr().out.splitlines()
    return status, json.loads(lines[-1])


def test_an_engine_that_answers_right_is_certified(fake, capsys):
    status, report = certify(fake, capsys)
    assert (status, report["certified"], report["why_not"]) == (0, True, None)
    assert [(row["scenario"], row["verdict"]) for row in report["rows"]] == [
        ("empty tiers", "pass"),
        ("pool", "pass"),
        ("tp2", "pass"),
        ("tp2 again", "pass"),
    ]
    assert report["tokens_per_block"] == 16
    assert report["tolerance"] == 1e-3


def test_the_table_has_a_line_a_scenario(fake, capsys):
    assert main(fake) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("11 prompts of up to 69 tokens in float32, blocks of 16")
    assert [line.split("  ")[0] for line in lines[3:7]] == ["empty tiers", "pool", "tp2", "tp2 again"]
    assert lines[-1] == "certified"


@pytest.mark.usefixtures("fake")
def test_the_list_of_plugins_has_the_engines_that_can_be_certified(capsys):
    assert main(["list", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert (listed["fake"]["group"], listed["fake"]["status"]) == ("kvtier.certify.v1", "available")


@pytest.mark.parametrize(
    ("how", "failed"),
    [
        ("wrong", {"pool", "tp2 again"}),
        ("nothing", {"pool", "tp2 again"}),
        ("dies", {"pool"}),
        ("fails", {"pool"}),
    ],
)
def test_an_engine_that_does_not_is_not_certified(fake, monkeypatch, capsys, how, failed):
    monkeypatch.setenv("FAKE", how)
    status, report = certify(fake, capsys)
    assert (status, report["certified"]) == (1, False)
    assert failed == {row["scenario"] for row in report["rows"] if row["verdict"] == "FAIL"}
    whys = {row["scenario"]: row["why"] for row in report["rows"]}
    expected = {
        "wrong": "first wrong after 17 tokens, by 1: 16 from pool restored",
        "nothing": "not certified: nothing was restored",
        "dies": "ended by itself, with status -6",
        "fails": "no room",
    }
    assert expected[how] in whys["pool"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--engine", "fakf"], "unknown engine 'fakf'; did you mean 'fake'?"),
        (["--model", "nowhere"], "nowhere: no such model: give"),
        (["--tokens", "36"], "--tokens 36: at least 37 are needed, for two blocks of 16"),
    ],
)
def test_what_cannot_be_run_is_status_2(fake, capsys, change, message):
    assert main([*fake, *change]) == 2
    assert message in capsys.readouterr().err


def test_an_engine_that_refuses_the_model_is_status_2(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE", "refused")
    assert main(fake) == 2
    assert "no such layers" in capsys.readouterr().err


@pytest.mark.parametrize("number_of_signal", [signal.SIGTERM, signal.SIGHUP])
def test_fr3_a_killed_certify_leaves_neither_processes_nor_files(fake, tmp_path, number_of_signal):
    temporary, number = tmp_path / "temporary", tmp_path / "pid"
    temporary.mkdir()
    environment = {**os.environ, "FAKE": "hangs", "FAKE_PID": str(number), "TMPDIR": str(temporary)}
    program = [sys.executable, "-m", "kvtier.main", *fake]
    with subprocess.Popen(program, stderr=subprocess.PIPE, env=environment) as process:
        deadline = time.monotonic() + 100
        while not (number.exists() and number.read_text().endswith("\n")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number_of_signal)
        process.communicate()
    assert process.returncode == 128 + number_of_signal
    assert list(temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


def test_fr4_without_a_directory_to_work_in_certify_cannot_be_run(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert main(fake) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "gone") in said
    assert "set TMPDIR to a writable one" in said


def test_fr4_a_full_disk_is_told_in_one_line(tmp_path):
    run_on(
        "tmpfs",
        tmp_path,
        """
from kvtier.certify.storage import Storage, reason_of
from kvtier_core import load_settings
storage = Storage(mnt, load_settings(environ={}))
for name in "ab":
    (mnt / "tiers" / name).write_bytes(bytes(30 << 20))
try:
    storage.save("stored")
except OSError as error:
    said = reason_of(error)
assert "No space left on device" in said and "\\n" not in said, said
""",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "at least 1"),
        (["--only", "restart,nonsense"], "'nonsense' is none of pool, restart, kill,"),
        (["--engine-options", "[1]"], "not a JSON object"),
        (["--engine-options", "{"], "not JSON"),
    ],
)
def test_c54_nonsense_arguments_of_certify_are_refused(fake, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main([*fake, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_page_has_every_scenario_and_option(fake, capsys):
    page = (Path(__file__).parents[2] / "docs/howto/certify.md").read_text()
    assert [name for name in SCENARIOS if f"| `{name}`" not in page] == []
    with pytest.raises(SystemExit):
        main([*fake, "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert options == set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE))


def test_an_engine_that_is_not_installed_is_told_with_its_package(fake, capsys, monkeypatch):
    monkeypatch.setattr("kvtier.certify.drivers.find_offers", lambda *_: [])
    assert main([*fake, "--engine", "vllm"]) == 2
    assert "pip install kvtier-vllm" in capsys.readouterr().err
