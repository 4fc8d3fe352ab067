"""``kvtier run`` on two machines that share nothing but a bucket."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from tests.tiers.s3_server import KEY, SECRET, S3Server
from tests.transformers.tiny import save_model, tiny_model

pytestmark = [pytest.mark.needs_torch, pytest.mark.timeout(300)]

TEXT = "The quick brown fox jumps over the lazy dog. " * 3
CONFIG = """
[pool]
capacity = "8MiB"

[tiers.s3]
type = "fsspec"
url = "s3://bucket/kv"

[tiers.s3.storage_options]
endpoint_url = "{endpoint}"
client_kwargs = {{ region_name = "us-east-1" }}
"""


@pytest.fixture
def server():
    server = S3Server()
    server.client().create_bucket(Bucket="bucket")
    yield server
    server.stop()


def run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Run one prompt in a process of its own, working in *directory*, and return its record."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
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
    record: dict[str, object] = json.loads(done.stdout)
    return record


def test_c33_k13_a_second_machine_restores_the_prefix_from_the_bucket(tmp_path, server, monkeypatch):
    model = save_model(tiny_model(), tmp_path / "downloaded")
    records = []
    for name in ("first", "second"):
        directory = tmp_path / name
        shutil.copytree(model, directory / "model")
        (directory / "prompts.jsonl").write_text(json.dumps({"prompt": TEXT}) + "\n")
        (directory / "kvtier.toml").write_text(CONFIG.format(endpoint=f"http://127.0.0.1:{server.port}"))
        records.append(run(directory, monkeypatch))
    first, second = records
    assert first["hits_by_tier"] == {}
    assert second["hits_by_tier"] == {"s3": 128}
    assert second["token_ids"] == first["token_ids"]
