"""``kvtier object``: what it shows of a bucket, and what it removes."""

import argparse
import json
import os
import re

import pytest

pytest.importorskip("obstore")

from kvtier_core.errors import ConfigError, TierOpenError
from kvtier_fsspec import command
from kvtier_testing.fixtures import NAMESPACE
from tests.tiers.fault_proxy import Answer, FaultProxy, Forward, Request, refuse
from tests.tiers.object_place import BUCKET, KEYS, Witness, make_tier
from tests.tiers.s3_server import KEY, SECRET, S3Server, options

UNUSED = json.dumps({"in_use_until": 0}).encode()


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
def proxy(port):
    proxy = FaultProxy(port)
    yield proxy
    proxy.stop()


@pytest.fixture
def kvtier_object(proxy, url, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def call(action: str, *more: str) -> str:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        there = ["--option", f"endpoint_url=http://127.0.0.1:{proxy.port}"]
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
    witness.put("left/namespace.json", UNUSED)
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
    witness.put("left/namespace.json", UNUSED)
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


def test_i18_gc_removes_nothing_that_is_not_kvtiers(port, url, kvtier_object, maker):
    inner = f"{url}/left"  # a tier that was given the URL of a namespace
    witness = fill(port, url, maker, "left")
    fill(port, inner, maker, NAMESPACE).close()
    witness.put("left/namespace.json", UNUSED)
    for path in ("README", "packs/README", "uses/mine.tmp", "data/x.tmp", "data/ab/abcd.kv"):
        witness.put(f"left/{path}", b"somebody else's")
    witness.put("left/uses/00c0ffee.tmp", b"of an engine")
    assert "left: no engine uses it, 4 objects that are not kvtier's and stay" in kvtier_object("status")
    kvtier_object("gc")
    (pack,) = witness.names(f"left/{NAMESPACE}/packs")
    assert sorted(witness.names("left")) == sorted(
        [
            "README", "data/ab/abcd.kv", "data/x.tmp", "packs/README", "uses/mine.tmp",
            f"{NAMESPACE}/namespace.json", f"{NAMESPACE}/packs/{pack}",
        ]
    )  # fmt: skip
    witness.close()


def test_i18_gc_stops_when_an_engine_comes_back(port, url, kvtier_object, proxy, maker):
    witness = fill(port, url, maker, "left")
    used = witness.get("left/namespace.json")
    witness.put("left/namespace.json", UNUSED)

    def come_back(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        witness.put("left/namespace.json", used)
        return answer

    proxy.fault = lambda request: come_back if "prefix=" in request.path and "left" in request.path else None
    assert "left: an engine uses it now, 2 objects stay" in kvtier_object("gc")
    assert len(witness.packs("left")) == 1
    witness.close()


def deny_each(request: Request, _forward: Forward) -> Answer:
    """Many are removed by one request, and each has an answer of its own."""
    error = b"<Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    denied = [b"<Error>" + key + error for key in re.findall(rb"<Key>.*?</Key>", request.body)]
    body = b"<DeleteResult>" + b"".join(denied) + b"</DeleteResult>"
    return Answer(200, {"Content-Type": "application/xml"}, body)


@pytest.mark.parametrize("denied", [refuse(403, "AccessDenied", "Access Denied"), deny_each])
def test_i18_gc_that_may_not_delete_says_so(port, url, kvtier_object, proxy, maker, denied):
    witness = fill(port, url, maker, "left")
    witness.put("left/namespace.json", UNUSED)
    before = witness.names("left")
    proxy.fault = lambda request: denied if request.method in ("POST", "DELETE") else None
    with pytest.raises(TierOpenError, match=r"^kvtier object .*Access.?Denied.*read, write, list and delete"):
        kvtier_object("gc")
    assert witness.names("left") == before
    witness.close()


def test_i18_a_folder_that_cannot_be_read_is_left_alone(port, url, kvtier_object, proxy, maker):
    witness = fill(port, url, maker, "left")
    witness.put("left/namespace.json", UNUSED)
    denied = refuse(403, "AccessDenied", "Access Denied")
    proxy.fault = lambda request: denied if "namespace.json" in request.path else None
    assert "left: left alone, its namespace.json can't be read (" in kvtier_object("status")
    assert "nothing to remove" in kvtier_object("gc")
    assert len(witness.packs("left")) == 1
    witness.close()


def test_i18_names_that_others_use_do_not_end_it(port, url, kvtier_object, maker):
    witness = fill(port, url, maker, NAMESPACE)
    for path in ("a//b", "sp ace/x", "per%cent/x", "d/../e", "e/", "f//", "back\\slash/x", "x?y/z", "ü/x"):
        witness.put(path, b"somebody else's")
    assert f"{NAMESPACE}: in use, 12 blocks in 1 packs" in kvtier_object("status")
    assert "nothing to remove" in kvtier_object("gc")
    witness.put("/c", b"the client can't list it")
    with pytest.raises(TierOpenError, match="remove that object, or set url to a prefix"):
        kvtier_object("gc")
    witness.close()


def test_i18_a_url_or_option_that_cannot_be_meant_is_told(kvtier_object, capsys):
    for arguments in (["status", "file:///tmp"], ["gc", "s3://"], ["gc", "s3://b", "--option", "secret"]):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        with pytest.raises(ConfigError):
            command.run(parser.parse_args(arguments))
    with pytest.raises(TierOpenError, match="check that the server runs"):
        kvtier_object("status", "--option", "endpoint_url=http://127.0.0.1:1")
