"""``kvtier object``: what it shows of a bucket, and what it removes."""

import argparse
import json
import os

import pytest

pytest.importorskip("obstore")

from kvtier_core.errors import ConfigError, TierOpenError
from kvtier_fsspec import command
from kvtier_testing.fixtures import NAMESPACE
from tests.tiers.object_place import BUCKET, KEYS, Witness, make_tier
from tests.tiers.s3_server import KEY, SECRET, S3Server, options


@pytest.fixture(scope="module")
def port():
    server = S3Server()
    server.client().create_bucket(Bucket=BUCKET)
    yield server.port
    server.stop()


@pytest.fixture
def url():
    return f"s3://{BUCKET}/{os.urandom(4).hex()}"


@pytest.fixture
def kvtier_object(port, url, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def call(action: str, *more: str) -> str:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        there = ["--option", f"endpoint_url=http://127.0.0.1:{port}"]
        assert command.run(parser.parse_args([action, url, *there, *more])) == 0
        return capsys.readouterr().out

    return call


def fill(port: int, url: str, maker, *namespaces: str) -> Witness:
    for namespace in namespaces:
        tier = make_tier({"url": url, "storage_options": options(port)}, namespace=namespace)
        tier.store_many(KEYS, [memoryview(maker.make(key)) for key in KEYS])
        tier.close()
    return Witness(port, url)


@pytest.fixture
def maker():
    from kvtier_testing.rows import RowMaker

    return RowMaker(NAMESPACE, 8192 - 64)


def test_i18_status_shows_each_namespace_and_changes_nothing(port, url, kvtier_object, maker):
    witness = fill(port, url, maker, NAMESPACE, "left")
    witness.put(f"left/{'namespace.json'}", json.dumps({"in_use_until": 0}).encode())
    witness.put("strange/thing", b"x")
    told = kvtier_object("status")
    assert f"{NAMESPACE}: in use, 12 blocks in 1 packs" in told
    assert "left: no engine uses it, 12 blocks" in told
    assert "strange: not kvtier's" in told
    assert "would remove 2 objects" in told
    assert SECRET not in told
    assert kvtier_object("status") == told
    witness.close()


def test_i18_gc_removes_what_no_engine_uses_and_nothing_else(port, url, kvtier_object, maker):
    witness = fill(port, url, maker, NAMESPACE, "left")
    witness.put("left/namespace.json", json.dumps({"in_use_until": 0}).encode())
    witness.put("strange/thing", b"x")
    witness.put(f"{NAMESPACE}/{KEYS[0].hex()[:2]}/{KEYS[0].hex()}.kv", b"of the first layout")
    witness.put(f"{NAMESPACE}/keeper/0.tmp", b"not old")
    told = kvtier_object("gc")
    assert "left: removed 2 objects" in told
    assert f"{NAMESPACE}: removed 1 objects" in told
    assert witness.names("left") == []
    assert witness.names("strange") == ["thing"]
    assert sorted(name.partition("/")[0] for name in witness.names(NAMESPACE)) == [
        "keeper",
        "namespace.json",
        "packs",
    ]
    assert "nothing to remove" in kvtier_object("gc")
    tier = make_tier({"url": url, "storage_options": options(port)})
    assert tier.contains(KEYS) == [True] * 12
    tier.close()
    witness.close()


def test_i18_a_url_or_option_that_cannot_be_meant_is_told(kvtier_object, capsys):
    for arguments in (["status", "file:///tmp"], ["gc", "s3://"], ["gc", "s3://b", "--option", "secret"]):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        with pytest.raises(ConfigError):
            command.run(parser.parse_args(arguments))
    with pytest.raises(TierOpenError, match="check that the server runs"):
        kvtier_object("status", "--option", "endpoint_url=http://127.0.0.1:1")
