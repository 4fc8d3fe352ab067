"""The tool that damages files: what it finds in tiers that keep their promises, and in some that don't."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_testing.corrupt import main
from kvtier_testing.corruptions import WAYS, contents_of, corrupt, kind_of

FAILURES = ("wrong_bytes", "process_ends", "refused_to_open", "unstorable")

TOOL = """
import sys
import kvtier_testing.corrupt as tool
{fault}
sys.exit(tool.main(sys.argv[1:]))
"""


def run(*arguments: object, fault: str = "", tier: str = "disk") -> dict:
    """The tool as people run it, with a *fault* put into the code: it forks, so it needs a process without threads."""
    done = subprocess.run(
        [sys.executable, "-c", TOOL.format(fault=fault), "--tier", tier, "--json", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == any(found[name] for name in FAILURES)
    return found


@pytest.mark.timeout(600)
def test_s1_s4_c30_c33_damaged_files_cost_hits_and_nothing_else(tmp_path):
    found = run("--corruptions", 150, "--seed", 3, "--directory", tmp_path)
    assert found["corruptions"] == 150
    assert {name: found[name] for name in FAILURES} == dict.fromkeys(FAILURES, 0), found["failures"]
    assert found["online"] > 0
    assert found["between_starts"] > 0
    assert found["exact_blocks"] > 1000
    assert {"#.ext", "#.kv", ".kvtier/index-#.db", ".kvtier/index-#.db-journal", ".kvtier/id"} <= found[
        "by_file"
    ].keys()
    assert sum(found["lost_beyond_damage_by_file"].values()) == found["lost_beyond_damage"]
    assert sum(found["lost_beyond_damage_by_warning"].values()) == found["lost_beyond_damage"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(600)
def test_i21_a_tier_is_damaged_whatever_its_setting_for_a_place_is_called(tmp_path):
    """This one has ``path``. Before, nothing was damaged, and all was well.

    SQLite maps its ``-shm`` file: who cuts that ends the process, which is why engines are processes of their own here.
    """
    found = run("--corruptions", 25, "--seed", 1, "--directory", tmp_path, tier="sqlite")
    assert found["corruptions"] == 25
    assert found["exact_blocks"] > 0
    assert found["wrong_bytes"] == 0, found["failures"]


MUTANTS = {
    "proofs that are not checked": (
        "wrong_bytes",
        "files",
        """
from kvtier_testing.rows import RowMaker
RowMaker.proves = lambda self, key, row: True
""",
    ),
    "a process that a file cut short ends": (
        "process_ends",
        "extents",
        """
import mmap
from kvtier_disk.extents.store import BlockStore
store, mapped = BlockStore.store, []
def broken(self, keys, rows):
    if not mapped:
        with open(self.opened.index.database.path, 'rb') as file:
            mapped.append(mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ))
    mapped[0][0]
    return store(self, keys, rows)
BlockStore.store = broken
""",
    ),
    "an index that is not made anew": (
        "refused_to_open",
        "extents",
        """
from kvtier_disk.extents.root import Root
def rebuild(self, why):
    raise OSError(why)
Root.rebuild = rebuild
""",
    ),
    "damage that is not mended while it runs": (
        "unstorable",
        "extents",
        """
from kvtier_disk.extents.upkeep import Upkeep
Upkeep._check_index = lambda self: None
""",
    ),
}
SHORT_PATIENCE = """
import kvtier_testing.corrupt_processes as processes
processes._STORABLE_WITHIN_S = 0.3
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("finding", "layout", "fault"), MUTANTS.values(), ids=MUTANTS.keys())
def test_the_tool_finds_what_is_wrong_with_a_broken_tier(tmp_path, finding, layout, fault):
    for seed in range(20):
        arguments = (
            "--corruptions",
            50,
            "--seed",
            seed,
            "--directory",
            tmp_path,
            "--set",
            f"layout={layout}",
        )
        if run(*arguments, fault=SHORT_PATIENCE + fault)[finding]:
            return
    raise AssertionError(f"1,000 damages, and no {finding}")


def test_every_way_changes_what_is_there_the_same_for_the_same_seed(tmp_path):
    seen = set()
    for seed in range(300):
        (damage, before, after), again = (damaged(tmp_path / f"{seed}{copy}", seed) for copy in ("a", "b"))
        assert again == (damage, before, after)
        if before != after:
            seen.add(damage.partition(" one-")[0])
    assert seen == set(WAYS)


def damaged(root: Path, seed: int) -> tuple[str, dict[str, bytes], dict[str, bytes]]:
    """What was done to a directory of two files, and what was in it before and is after that."""
    root.mkdir()
    for name in ("one-1.db", "one-2.db"):
        (root / name).write_bytes(random.Random(name).randbytes(9000))
    before = contents_of(root)
    damage = corrupt(root, {"one-1.db": b"old"}, random.Random(seed))
    return str(damage), before, contents_of(root)


def test_a_directory_without_files_has_nothing_to_damage(tmp_path):
    assert corrupt(tmp_path, {}, random.Random(0)) is None


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("ns/000000001a.ext", "#.ext"),
        (".kvtier/index-000001.db-journal", ".kvtier/index-#.db-journal"),
        ("ns/namespace.json", "namespace.json"),
        (".kvtier/alive/12-0abc1", ".kvtier/alive/#-#"),
    ],
)
def test_a_kind_is_a_name_without_its_numbers(path, kind):
    assert kind_of(path) == kind


def test_a_tier_that_keeps_nothing_and_an_unknown_one_are_refused(capsys):
    assert main(["--tier", "memory"]) == 2
    assert "not persistent" in capsys.readouterr().err
    assert main(["--tier", "nothing"]) == 2
    assert "unknown tier type 'nothing'" in capsys.readouterr().err
