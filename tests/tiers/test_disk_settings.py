"""What the disk tier's settings refuse before anything starts (C53, C54)."""

from pathlib import Path

import pytest

from kvtier.main import main
from kvtier_disk import DiskSettings
from tests.tiers.extents import settings

NO_DIRECTORY = [
    ("file:///data/kv", 'is a url: write root = "/data/kv"'),
    ("s3://bucket/kv", r'is a url: use the fsspec tier \(type = "fsspec", url = "s3://bucket/kv"\)'),
    ("S3:/bucket/kv", 'type = "fsspec"'),
    ("gs://user:hunter2@bucket/kv", 'type = "fsspec"'),
    ("$HOME/kv", r"\$HOME in .* is not replaced by what the variable holds"),
    ("/data/${USER}/kv", r"\$\{USER\} in .* is not replaced"),
    ("%TEMP%/kv", "%TEMP% in .* is not replaced"),
    ("C:\\kv", "is a path of Windows"),
    ("C:/kv", "is a path of Windows"),
    ("\\\\server\\kv", "is a path of Windows"),
    ("~nobody-of-this-name/kv", "home of a user that has none"),
]


@pytest.mark.parametrize(("root", "why"), NO_DIRECTORY)
def test_r7_c54_a_root_that_is_no_path_of_this_machine_is_refused(root, why):
    with pytest.raises(ValueError, match=why):
        DiskSettings.model_validate({"type": "disk", "root": root})
    with pytest.raises(ValueError, match="must name a directory"):
        settings(Path(root))


@pytest.mark.parametrize("root", ["file:///data/kv", "gs://user:hunter2@bucket/kv"])
@pytest.mark.parametrize("command", [["config", "--check"], ["doctor"]])
def test_r7_c54_the_check_of_a_configuration_and_doctor_say_so(tmp_path, monkeypatch, capsys, command, root):
    (tmp_path / "kvtier.toml").write_text(f'[tiers.disk]\ntype = "disk"\nroot = "{root}"\n')
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--config", "kvtier.toml"]) != 0
    said = "".join(capsys.readouterr())
    assert "is a url" in said
    assert "hunter2" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["kvtier.toml"]


def test_r7_c54_the_home_of_the_user_is_put_in_its_place(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings(Path("~/kv")).root == tmp_path / "kv"


@pytest.mark.parametrize("root", ["kv", "./a:b", "/data/kv 1%", "/data/5$", "/c:/kv"])
def test_r7_c54_other_names_are_taken(root):
    assert settings(Path(root)).root == Path(root)
