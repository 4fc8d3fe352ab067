"""The tutorial works as it stands: its files and commands, typed into an empty directory, do what it promises.

The network is closed to the tests, so what the tutorial installs is lent by the environment they run in: the
directory's own environment sees its packages. The tutorial's package itself is installed by the command on the page.
"""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

from kvtier.new_tier.render import render
from tests.docs.tutorial import blocks, script, shown

TIMEOUT_S = 600.0

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)  # it makes an environment, which takes long on a busy machine


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """An empty directory but for the ``.venv`` that the page makes, which finds our packages and ``kvtier``."""
    place = tmp_path / "shelves"
    place.mkdir()
    venv.create(place / ".venv")
    bin_directory = place / ".venv" / "bin"
    packages = next((place / ".venv").glob("lib/python*/site-packages"))
    ours = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    packages.joinpath("lent.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in dict.fromkeys(ours))
    )
    # pip, too: the page's own ``venv`` finds the lent one and makes no command, and another's would install elsewhere.
    for name, module in {"kvtier": "kvtier.main", "pip": "pip._internal.cli.main"}.items():
        command = bin_directory / name
        command.write_text(
            f"#!{bin_directory / 'python'}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        )
        command.chmod(0o755)
    return place


def type_in(place: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Do what the page says in *place*, of the commands only those called *names*."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this the wrong way round: the backend is lent too
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return subprocess.run(
        ["bash", "-c", script(*names)],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def output_of(done: subprocess.CompletedProcess[str], name: str) -> str:
    return done.stdout.split(f"=== {name}\n")[1].split("\n=== ")[0]


def test_every_block_is_marked_and_used():
    assert [block.name for block in blocks() if block.name] == [
        "environment",
        "package",
        "src/kvtier_shelf/tier.py",
        "tests/test_shelf.py",
        "install",
        "check",
        "kvtier.toml",
        "prompts.jsonl",
        "use",
    ]


def test_i21_what_the_page_shows_is_what_new_tier_writes():
    written = render("shelf", hooks=False, licence="apache")
    for name, text in shown().items():
        assert text == written[name], f"the page's {name} is not that of kvtier.new_tier.templates"
    (entry_point,) = [block.text for block in blocks() if block.language == "toml" and not block.name]
    assert entry_point in written["pyproject.toml"]


def test_c52_the_tier_has_less_than_60_lines_of_code():
    lines = [line for line in shown()["src/kvtier_shelf/tier.py"].splitlines() if line.strip()]
    assert 20 < len(lines) < 60


def test_c50_c52_the_tier_is_found_and_passes_the_tests_of_tiers(workplace):
    done = type_in(workplace, "environment", "package", "install", "check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"shelf +kvtier-shelf +0\.1\.0 .* available", output_of(done, "install"))
    assert not list(distributions(name="kvtier-shelf", path=[sysconfig.get_path("purelib")])), (
        "installed into ours"
    )
    passed = re.search(r"(\d+) passed, (\d+) skipped", output_of(done, "check"))
    assert passed is not None, done.stdout
    assert int(passed[1]) > 30
    assert int(passed[2]) < int(passed[1]), "the rules are for this kind of tier"


def test_the_change_that_the_page_proposes_makes_tests_fail(tmp_path):
    for name, text in render("shelf", hooks=False, licence="none").items():
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(name).write_text(text.replace("REPLACE INTO", "INSERT INTO"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "UNIQUE constraint failed" in done.stdout
