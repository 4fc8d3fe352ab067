"""The crash tool: what it finds in tiers that keep their promises, and in some that don't."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_testing.crash import main
from kvtier_testing.crash_processes import keys_of
from kvtier_testing.power_loss import Call, what_is_left

ROOT = Path("/root")


def run(*arguments: object) -> dict[str, int]:
    """The tool as people run it: it forks, so it needs a process without threads."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_testing.crash", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    assert done.returncode == any(
        found[name] for name in ("wrong_bytes", "failed_restarts", "unstorable_keys", "acknowledged_missing")
    )
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["extents", "files"])
def test_c32_k7_o3_killed_writers_leave_complete_blocks_and_keys_that_can_be_stored(tmp_path, layout):
    found = run(
        "--tier", "disk", "--kills", 12, "--seed", 5, "--directory", tmp_path,
        "--set", f"layout={layout}", "--set", "min_free=0",
    )  # fmt: skip
    assert (found["wrong_bytes"], found["failed_restarts"], found["unstorable_keys"]) == (0, 0, 0)
    assert found["acknowledged_missing"] == 0
    assert found["exact_blocks"] > 0
    assert found["killed_at_a_moment"] == found["killed_between_lines"] == 6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
def test_c32_after_power_failures_nothing_wrong_is_served_and_every_key_can_be_stored(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    found = run(
        "--tier", "disk", "--kills", 0, "--power-cuts", 20, "--directory", tmp_path, "--set", "min_free=0"
    )
    assert (found["wrong_bytes"], found["failed_restarts"], found["unstorable_keys"]) == (0, 0, 0)
    assert found["exact_blocks"] > 0


def test_a_tier_that_keeps_nothing_is_refused(capsys):
    assert main(["--tier", "memory", "--kills", "1"]) == 2
    assert "not persistent" in capsys.readouterr().err


def test_an_unknown_tier_and_a_wrong_setting_are_refused(capsys):
    assert main(["--tier", "nothing"]) == 2
    assert "unknown tier type 'nothing'" in capsys.readouterr().err
    assert main(["--tier", "disk", "--set", "threads=none"]) == 2
    assert "--set NAME=VALUE" in capsys.readouterr().err


# The tool's own eyes.

BROKEN = """
import json, sys
from pathlib import Path
from kvtier_testing import crash_processes as c
from kvtier_testing.subjects import Subject
from kvtier_disk import FilesTier, layout

def publish_at_once(self, key, content, tmp):
    path = self._folder_of(key).path / (key.hex() + ".kv")
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    fd = __import__("os").open(path, 0o102, 0o600)
    for begin in range(0, len(content), 4096):
        __import__("os").write(fd, content[begin : begin + 4096])
        __import__("time").sleep(0.001)  # so that most moments are in the middle of a block
    __import__("os").close(fd)

def fill(fd, into):
    __import__("os").preadv(fd, [into], 0)
    return None

if sys.argv[2] == "torn":
    layout.FileLayout._publish = publish_at_once
    layout.FileLayout._problem = lambda self, handle, status: None
    layout._fill = fill
elif sys.argv[2] == "closed":
    def open(self):
        if Path(sys.argv[1]).exists():
            raise OSError("in use")
        Path(sys.argv[1]).mkdir()
        self._layout.make(), self._layout.prepare()
    FilesTier.open = open
values = {"type": "disk", "root": sys.argv[1], "layout": "files", "capacity": 8 << 20}
settings = FilesTier.Settings.model_validate(values)
subject = Subject(cls=FilesTier, settings=settings)
seen = __import__("collections").Counter()
rng = __import__("random").Random(0)
for number in range(int(sys.argv[3])):
    told = c.kill_writer(subject, number, None, rng.uniform(0.02, 0.3))
    seen += c.look(subject, number, told, torn_is_wrong=True)
print(json.dumps(seen))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "finding", "kills"), [("torn", "wrong_bytes", 8), ("closed", "failed_restarts", 2)]
)
def test_the_tool_finds_what_is_wrong_with_a_broken_tier(tmp_path, fault, finding, kills):
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, tmp_path / "root", fault, str(kills)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[finding] > 0


# What a power failure leaves.


def write(name: str, offset: int, data: bytes) -> Call:
    return Call(kind="W", path=str(ROOT / name), offset=offset, length=len(data), data=data)


def named(kind: str, name: str, target: str = "") -> Call:
    return Call(kind=kind, path=str(ROOT / name), target=str(ROOT / target) if target else "")


def possible(before: dict[str, bytes], *calls: Call) -> set[tuple[tuple[str, bytes], ...]]:
    """Everything that many power failures left."""
    return {
        tuple(sorted(what_is_left(before, ROOT, calls, random.Random(seed)).items())) for seed in range(200)
    }


def test_what_was_synced_is_there_and_the_rest_may_be():
    synced = [write("a", 0, b"1111"), named("S", "a")]
    assert possible({"a": b"0000"}, *synced) == {(("a", b"1111"),)}
    assert possible({"a": b"0000"}, *synced, write("a", 0, b"2222")) == {(("a", b"1111"),), (("a", b"2222"),)}


def test_writes_that_no_sync_covers_may_be_reordered_and_torn_between_sectors():
    left = possible({"a": bytes(1024)}, write("a", 0, b"\1" * 1024), write("a", 0, b"\2" * 512))
    contents = {dict(files)["a"] for files in left}
    assert bytes(1024) in contents
    assert b"\2" * 512 + b"\1" * 512 in contents
    assert b"\2" * 512 + bytes(512) in contents
    assert bytes(512) + b"\1" * 512 in contents
    assert all(len(set(content[:512])) == 1 for content in contents)


def test_names_change_in_order_and_a_sync_makes_earlier_ones_safe():
    left = possible({}, named("C", "a"), named("R", "a", "b"), named("C", "c"))
    assert {tuple(name for name, _ in files) for files in left} == {(), ("a",), ("b",), ("b", "c")}
    left = possible({}, named("C", "a"), named("S", "a"), named("U", "a"))
    assert {tuple(name for name, _ in files) for files in left} == {("a",), ()}


def test_a_file_that_was_cut_or_grown_without_a_sync_may_be_either():
    grown = Call(kind="T", path=str(ROOT / "a"), length=8)
    assert possible({"a": b"1234"}, grown) == {(("a", b"1234"),), (("a", b"1234\0\0\0\0"),)}


def test_every_round_has_keys_of_its_own():
    assert not {*keys_of(1)} & {*keys_of(2)}
