"""``kvtier new-tier``: what it writes passes the kit as it is, whatever it is called."""

import os
import subprocess
import sys
import tomllib

import pytest

from kvtier.main import USAGE, main


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "options"), [("my_store", ["--hooks"]), ("tape2", [])])
def test_i21_the_rendered_package_passes_its_tests(tmp_path, name, options):
    assert main(["new-tier", name, "--into", str(tmp_path), *options]) == 0
    (place,) = tmp_path.iterdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{place / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout


@pytest.mark.parametrize(("licence", "said"), [("apache", "Apache-2.0"), ("mit", "MIT"), ("none", None)])
def test_i21_the_licence_is_the_authors_choice(tmp_path, licence, said):
    assert main(["new-tier", "tape", "--into", str(tmp_path), "--licence", licence]) == 0
    place = tmp_path / "kvtier-tape"
    project = tomllib.loads((place / "pyproject.toml").read_text())["project"]
    assert project.get("license") == said
    assert (place / "LICENSE").exists() == (said is not None)
    assert project["entry-points"]["kvtier.tiers.v1"] == {"tape": "kvtier_tape:TapeTier"}


def test_i21_nothing_of_the_template_is_left(tmp_path):
    assert main(["new-tier", "my_store", "--into", str(tmp_path)]) == 0
    (place,) = tmp_path.iterdir()
    assert place.name == "kvtier-my-store"
    for file in place.rglob("*"):
        assert "shelf" not in file.name
        assert file.is_dir() or "shelf" not in file.read_text().lower()


@pytest.mark.parametrize("name", ["My_store", "2tape", "my__store", "kv-tape", ""])
def test_i21_what_can_be_no_tier_types_name_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        main(["new-tier", name])
    assert "is no name for a tier type: use lower case letters" in capsys.readouterr().err


def test_i21_a_name_that_a_package_has_already_is_refused(tmp_path, capsys, site):
    site.install("other-tape", {"kvtier.tiers.v1": {"tape": "other:Tape"}}, {})
    for name, package in (("disk", "kvtier-disk"), ("testing", "kvtier-testing"), ("tape", "other-tape")):
        assert main(["new-tier", name, "--into", str(tmp_path)]) == USAGE
        said = capsys.readouterr().err
        assert f"{package} " in said
        assert "is installed already, and it would " in said
    assert list(tmp_path.glob("kvtier-*")) == []


def test_i21_what_is_there_is_not_written_over(tmp_path, capsys):
    (tmp_path / "kvtier-tape").mkdir()
    assert main(["new-tier", "tape", "--into", str(tmp_path)]) == USAGE
    assert "is there already: choose another name" in capsys.readouterr().err
    assert not list((tmp_path / "kvtier-tape").iterdir())
