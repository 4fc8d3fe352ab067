"""Two engines in processes of their own, with nothing but a Mooncake Store in common. Run by ``nox -s mooncake``."""

import json
import subprocess
import sys

import pytest

from tests.tiers.mooncake_store import MooncakeStore, is_installed

if not is_installed():
    pytest.skip("needs the package mooncake-transfer-engine-non-cuda", allow_module_level=True)
pytest.importorskip("transformers")

from tests.transformers.tiny import save_model, tiny_model

CONFIG = """
[pool]
capacity = "16MiB"

[tiers.far]
type = "mooncake"
master_server_address = "{address}"
"""


@pytest.fixture
def store(tmp_path):
    store = MooncakeStore(tmp_path)
    yield store
    store.stop()


def test_k7_a_second_engine_restores_the_prefix_from_the_store(store, tmp_path):
    save_model(tiny_model(), tmp_path / "model")
    (tmp_path / "kvtier.toml").write_text(CONFIG.format(address=store.address))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a b c d " * 40, "max_tokens": 8}) + "\n")
    command = (
        *(sys.executable, "-m", "kvtier.main", "run", "--json"),
        *("--model", "model", "--prompts", "prompts.jsonl", "--config", "kvtier.toml"),
    )
    first, second = (
        json.loads(subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout)
        for _ in range(2)
    )
    assert first["hits_by_tier"] == {}
    assert second["hits_by_tier"]["far"] > 0
    assert second["text"] == first["text"]
