"""Real vLLM twice, with nothing in common but a bucket: the second engine restores what the first one stored."""

import os

import pytest

pytest.importorskip("obstore")

from tests.tiers.s3_server import S3Server
from tests.vllm.engines import connector, needs_vllm, prompt

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]


def test_i18_a_second_engine_restores_the_prefix_from_the_bucket(start):
    server = S3Server()
    try:
        server.client().create_bucket(Bucket="bucket")
        url = f"s3://bucket/{os.urandom(4).hex()}"
        far = {"type": "fsspec", "url": url, "storage_options": server.options}
        transfer = connector({"pool": {"capacity": "4MiB"}, "tiers": {"far": far}})
        wanted = prompt(1)
        first = start(transfer)
        right = first.generate(wanted)
        first.generate([1, 2, 3])  # stores happen in the steps after
        first.call("settle")
        assert first.close() == 0
        second = start(transfer)
        assert second.generate(wanted) == right
        assert second.call("books")["hits"] == {"far": 10}
        assert second.close() == 0
    finally:
        server.stop()
