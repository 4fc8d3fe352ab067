import json
import re
import sys
import time

import pytest

from kvtier.main import main

SECRET = "hunter2-very-secret"
TIER = """
import threading
from pydantic import SecretStr
from kvtier_core import TierOpenError
from kvtier_core.tier import BlockInfo, BlockTier, TierInfo, TierSettings

RELEASE = threading.Event()
BLOCKS = {}
REMOVED = []

class Unreadable(Exception):
    def __str__(self): raise RuntimeError

class Settings(TierSettings):
    fail: str = ""
    password: SecretStr = SecretStr("hunter2-very-secret")

class Tier(BlockTier):
    Settings = Settings
    info = TierInfo(medium="fake", persistent=True, default_capacity=8 << 20)

    def __init__(self, settings, context):
        super().__init__(settings, context)
        self.do("build")
        self.blocks = BLOCKS.setdefault(context.namespace, {})

    def do(self, step):
        place, _, how = self.settings.fail.partition(":")
        if place != step:
            return ""
        if how == "hang":
            RELEASE.wait()
        if how == "raise-again" and any(BLOCKS.values()):
            raise OSError("refused")
        if how == "raise":
            raise OSError("refused " + self.settings.password.get_secret_value())
        if how == "open-error":
            raise TierOpenError("no storage for " + self.settings.password.get_secret_value())
        if how == "unreadable":
            raise Unreadable
        if how == "exit":
            raise SystemExit(3)
        return how

    def open(self): self.do("open")
    def contains(self, keys):
        self.do("contains")
        return [key in self.blocks for key in keys]
    def store(self, key, block):
        if self.do("store") != "lose":
            self.blocks[key] = bytes(block)
    def load(self, key, into):
        how = self.do("load")
        if how == "absent" or key not in self.blocks:
            return False
        if how != "nothing":
            into[:] = self.blocks[key]
        if how == "flip":
            into[0] ^= 1
        return True
    def delete(self, keys):
        if self.do("delete") != "keep":
            for key in keys: self.blocks.pop(key, None)
    def close(self): self.do("close")
    def scan(self):
        return [BlockInfo(key=key, bytes=len(block), time=0.0) for key, block in self.blocks.items()]

class Removable(Tier):
    def remove_namespace(self):
        self.do("remove")
        REMOVED.append(self.context.namespace)
        del BLOCKS[self.context.namespace]
"""
HOOKS = """
from kvtier_core.tier import JobResult, TierInfo, TierSettings, hookimpl

class Tier:
    Settings = TierSettings
    info = TierInfo(medium="fake", persistent=True, bounded_by="tier")

    def __init__(self, settings, context):
        self.blocks, self.results = {}, []
    @hookimpl
    def lookup(self, job): return [key in self.blocks for key in job.keys]
    @hookimpl
    def submit_store(self, job):
        self.blocks.update({key: bytes(buffer) for key, buffer in zip(job.keys, job.buffers)})
        self.results.append(JobResult(job_id=job.id))
    @hookimpl
    def submit_load(self, job):
        for key, buffer in zip(job.keys, job.buffers): buffer[:] = self.blocks[key]
        self.results.append(JobResult(job_id=job.id))
    @hookimpl
    def get_finished_jobs(self):
        results, self.results = self.results, []
        return results
"""


@pytest.fixture
def tier(install_tier):
    install_tier("fake", source=TIER, target="Removable")
    install_tier("kept", source=TIER)
    install_tier("hooks", source=HOOKS)
    yield lambda: sys.modules["kvtier_fake_module"]
    for name in ("kvtier_fake_module", "kvtier_kept_module"):
        if name in sys.modules:
            sys.modules[name].RELEASE.set()


@pytest.fixture
def doctor(tmp_path, capsys):
    """Runs the doctor on a configuration; the exit status and the reports by tier."""

    def run(text, *arguments):
        file = tmp_path / "kvtier.toml"
        file.write_text(text)
        status = main(["doctor", "--config", str(file), "--json", *arguments])
        out, err = capsys.readouterr()
        assert SECRET not in out + err
        answer = json.loads(out)
        assert answer["ok"] == (status == 0)
        return status, {report["name"]: report for report in answer["tiers"]}

    return run


def _cold(fail="", type_="fake"):
    return f"[tiers.cold]\ntype = '{type_}'\n" + (f"fail = '{fail}'\n" if fail else "")


def test_c50_a_working_tier_is_opened_filled_asked_and_emptied(tier, doctor):
    status, reports = doctor(_cold())
    assert status == 0
    cold = reports["cold"]
    assert (cold["ok"], cold["problem"], cold["left_behind"]) == (True, None, None)
    assert set(cold["seconds"]) == {"open", "store", "load", "delete"}
    assert (cold["distribution"], cold["version"]) == ("kvtier-fake", "1.0")
    assert len(tier().REMOVED) == 1
    assert tier().BLOCKS == {}


def test_c32_nothing_else_below_the_disk_tiers_root_is_touched(doctor, tmp_path):
    root = tmp_path / "blocks"
    other = root / "some-other-namespace" / "00" / "00aa.kv"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"bytes of another")
    text = f"[tiers.disk]\ntype = 'disk'\nroot = '{root}'\n[tiers.mem]\ntype = 'memory'\n"
    status, reports = doctor(text + "[tiers.small]\ntype = 'memory'\ncapacity = '4KiB'\n")
    assert (status, list(reports)) == (0, ["disk", "mem", "small"])
    assert [path for path in root.rglob("*") if path.is_file()] == [other]
    assert [path.name for path in root.iterdir()] == ["some-other-namespace"]


@pytest.mark.parametrize("capacity", ["4KiB", "100KiB", "500KiB"])
def test_c54_a_capacity_that_a_message_asks_for_is_taken(doctor, tmp_path, capacity):
    text = f"[tiers.disk]\ntype = 'disk'\nroot = '{tmp_path / 'root'}'\nmin_free = 0\ncapacity = '{{}}'\n"
    status, reports = doctor(text.format(capacity))
    assert status == 1
    wanted = re.search(r"set it to (\S+) at least", reports["disk"]["problem"])
    assert wanted is not None
    status, reports = doctor(text.format(wanted[1]))
    assert (status, reports["disk"]["ok"]) == (0, True), reports


def test_c50_a_tier_on_the_hook_specs_is_examined_and_what_stays_is_told(tier, doctor):
    status, reports = doctor(_cold(type_="hooks"))
    assert status == 0
    assert set(reports["cold"]["seconds"]) == {"open", "store", "load"}
    assert "this tier type can't delete" in reports["cold"]["left_behind"]


def test_c50_a_tier_that_cannot_remove_its_namespace_is_told(tier, doctor):
    status, reports = doctor(_cold(type_="kept"))
    assert status == 0
    assert "kvtier-doctor-" in reports["cold"]["left_behind"]


FAILURES = [
    ("build:raise", "open", "refused"),
    ("open:raise", "open", "refused"),
    ("open:open-error", "open", "no storage"),
    ("store:raise", "store", "refused"),
    ("store:exit", "store", "SystemExit"),
    ("load:raise", "load", "refused"),
    ("load:absent", "load", "not found"),
    ("load:nothing", "load", "wrong bytes"),
    ("load:flip", "load", "wrong bytes"),
    ("delete:raise", "delete", "refused"),
    ("delete:exit", "delete", "SystemExit"),
    ("delete:keep", "delete", "still there after it was deleted"),
    ("store:lose", "load", "not found"),
    ("remove:raise", "delete", "refused"),
]


@pytest.mark.parametrize(("fail", "step", "why"), FAILURES)
def test_c33_a_failing_step_is_named_with_why_and_what_to_do(tier, doctor, fail, step, why):
    status, reports = doctor(_cold(fail) + "[tiers.good]\ntype = 'memory'\n")
    assert status == 1
    cold = reports["cold"]
    assert (cold["ok"], cold["failed_step"]) == (False, step)
    assert why in cold["problem"]
    if fail == "open:open-error":  # such an error says what to do, and nothing else may contradict it
        assert cold["advice"] is None
    else:
        assert cold["advice"].startswith("see ")
    assert reports["good"]["ok"]
    if not fail.startswith(("delete", "remove")):
        assert all(not blocks for blocks in tier().BLOCKS.values()), "what it stored is removed all the same"


def test_b20_a_close_that_raises_is_not_blamed_on_deletion(tier, doctor):
    status, reports = doctor(_cold("close:raise"))
    cold = reports["cold"]
    assert (status, cold["failed_step"]) == (1, "close")
    assert "close raised" in cold["advice"]


def test_b20_an_open_that_raises_the_second_time_is_not_blamed_on_deletion(tier, doctor):
    status, reports = doctor(_cold("open:raise-again"))
    cold = reports["cold"]
    assert (status, cold["failed_step"]) == (1, "open again")
    assert "lock" in cold["advice"]


def test_b20_one_tier_is_one_tier(tier, tmp_path, capsys):
    file = tmp_path / "kvtier.toml"
    file.write_text("[tiers.good]\ntype = 'memory'\n")
    assert main(["doctor", "--config", str(file)]) == 0
    assert capsys.readouterr().out.endswith("all is well (1 tier)\n")


@pytest.mark.parametrize("fail", ["open:raise", "open:hang"])
def test_c33_a_tier_without_which_an_engine_may_start_is_examined_all_the_same(tier, doctor, fail):
    retry = "[tiers.cold.limits]\nopen_retry = '1m'\n"
    status, reports = doctor(_cold(fail) + retry, "--timeout", "3s")
    cold = reports["cold"]
    assert (status, cold["failed_step"]) == (1, "open")
    if fail == "open:hang":
        assert cold["problem"].endswith("check its storage")
    else:
        assert cold["advice"].startswith("see that its storage is there")


def test_c30_an_error_without_readable_text_is_named_by_its_type(tier, doctor):
    status, reports = doctor(_cold("delete:unreadable"))
    cold = reports["cold"]
    assert (status, cold["failed_step"]) == (1, "delete")
    assert cold["problem"].startswith("Unreadable: ")


@pytest.mark.parametrize("how", ["twice", "unknown", "no-result"])
def test_c30_a_fault_that_the_engine_counts_is_not_well(install_tier, doctor, how):
    answers = {
        "twice": "results * 2",
        "unknown": "results + [JobResult(job_id=99)]",
        "no-result": "results + [None]",
    }
    # Only beside a result, and not at every poll.
    source = HOOKS.replace("return results", f"return {answers[how]} if results else []")
    install_tier("hooks", source=source)
    status, reports = doctor(_cold(type_="hooks"))
    cold = reports["cold"]
    assert (status, cold["ok"], cold["failed_step"]) == (1, False, "keep to the interface")
    assert "fits no job that this tier has under way" in cold["problem"]
    assert "tell the tier's author" in cold["advice"]
    assert set(cold["seconds"]) == {"open", "store", "load"}


@pytest.mark.parametrize(
    ("fail", "line"),
    [
        ("build:raise", 'self.do("build")'),
        ("open:raise", 'self.do("open")'),
        ("open:open-error", 'self.do("open")'),
        ("store:raise", 'self.do("store")'),
        ("load:raise", 'self.do("load")'),
        ("delete:raise", 'self.do("delete")'),
    ],
)
def test_k9_debug_shows_where_a_tier_raised_and_no_secret(tier, tmp_path, capsys, fail, line):
    file = tmp_path / "kvtier.toml"
    file.write_text(_cold(fail))
    assert main(["doctor", "--config", str(file)]) == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert main(["--debug", "doctor", "--config", str(file)]) == 1
    out, err = capsys.readouterr()
    assert "Traceback (most recent call last):" in err
    assert line in err
    assert SECRET not in out + err


def test_c33_a_tier_slower_than_its_limits_is_told_as_that(tier, doctor):
    limits = "[tiers.cold.limits]\nload_timeout = '50ms'\n"
    status, reports = doctor(_cold("load:hang") + limits)
    cold = reports["cold"]
    assert (status, cold["failed_step"]) == (1, "answer in time")
    assert "limits.load_timeout" in cold["problem"]
    assert "raise these limits" in cold["advice"]


@pytest.mark.parametrize("step", ["build", "open", "store", "load", "delete", "remove", "close"])
def test_c31_a_tier_that_hangs_is_reported_and_not_waited_for(tier, doctor, step):
    started = time.monotonic()
    status, reports = doctor(_cold(f"{step}:hang") + "[tiers.good]\ntype = 'memory'\n", "--timeout", "3s")
    assert time.monotonic() - started < 60
    assert status == 1
    cold = reports["cold"]
    assert not cold["ok"]
    assert cold["advice"].startswith("see ") if cold["advice"] else "check its storage" in cold["problem"]
    if step != "close":
        assert cold["failed_step"] == {"build": "open", "remove": "delete"}.get(step, step)
        assert "within 3 s" in cold["problem"]
    assert reports["good"]["ok"]


def test_for_people_each_tier_is_a_paragraph(tier, tmp_path, capsys):
    file = tmp_path / "kvtier.toml"
    file.write_text(
        _cold("store:raise")
        + "[tiers.good]\ntype = 'memory'\n[tiers.off]\ntype = 'memory'\nenabled = false\n"
    )
    assert main(["doctor", "--config", str(file)]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert "tier 'cold' (type 'fake' of kvtier-fake 1.0): FAILED to store (" in out
    assert "\n  why: " in out
    assert "\n  what to do: see that its storage has room" in out
    assert "tier 'good' (type 'memory' of kvtier-memory" in out
    assert out.endswith("1 of 2 tiers failed; not tried, because disabled: off\n")
    assert SECRET not in out


def test_c54_without_a_tier_there_is_nothing_to_examine_and_it_says_why(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)

    def why(*arguments):
        assert main(["doctor", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err

    assert "no settings file was given: name one with --config or KVTIER_CONFIG\n" in why()
    file = tmp_path / "kvtier.toml"
    file.write_text("[pool]\ncapacity = '1GiB'\n")
    assert "./kvtier.toml is there and was not read (--config kvtier.toml)" in why("--json")
    err = why("--config", "kvtier.toml")
    assert 'add a table [tiers.NAME], type from "kvtier list", to kvtier.toml' in err
    assert "not read" not in err
    file.write_text("[tiers.off]\ntype = 'memory'\nenabled = false\n")
    assert "every tier is disabled (off): set enabled = true" in why("--config", "kvtier.toml")


def test_c50_a_broken_plugin_is_a_configuration_error(install_tier, tmp_path, capsys):
    install_tier("fake", source="raise ImportError('libfoo')")
    file = tmp_path / "kvtier.toml"
    file.write_text(_cold())
    assert main(["doctor", "--config", str(file)]) == 2
    assert "libfoo" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["soon", "0", "-1s"])
def test_a_timeout_that_makes_no_sense_is_wrong_usage(value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", f"--timeout={value}"])
    assert caught.value.code == 2
    assert "--timeout" in capsys.readouterr().err
