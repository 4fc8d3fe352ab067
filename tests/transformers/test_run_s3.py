"""``kvtier run`` on two machines that share nothing but a bucket."""

import pytest

pytest.importorskip("obstore")

from tests.tiers.s3_server import KEY, SECRET, S3Server
from tests.transformers.two_machines import RESTORABLE, run_on_both

pytestmark = [pytest.mark.needs_torch, pytest.mark.timeout(300)]

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


def test_c33_k13_a_second_machine_restores_the_prefix_from_the_bucket(tmp_path, server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    first, second = run_on_both(tmp_path, CONFIG.format(endpoint=f"http://127.0.0.1:{server.port}"), SECRET)
    assert first["hits_by_tier"] == {}
    assert second["hits_by_tier"] == {"s3": RESTORABLE}
    assert second["token_ids"] == first["token_ids"]
