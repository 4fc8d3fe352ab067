"""The command ``kvtier certify``, with an engine that only seems to keep something: table, JSON, exit status."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvtier.certify.scenarios import SCENARIOS
from kvtier.main import main
from tests.tiers.small_disk import run_on

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
    # A process that ignores a signal, as nohup makes it, hands that on to its children.
    told = f"import signal, sys; signal.signal({number_of_signal:d}, signal.SIG_DFL)"
    program = [sys.executable, "-c", f"{told}; from kvtier.main import main; sys.exit(main())", *fake]
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
    monkeypatch.setattr("kvtier.engines.find_offers", lambda *_: [])
    assert main([*fake, "--engine", "vllm"]) == 2
    assert "pip install kvtier-vllm" in capsys.readouterr().err
