"""The fsspec tier on S3 (moto's server on loopback): the conformance tests, and what a server and its bucket can do."""

import json
import logging
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtier_core.errors import TierOpenError
from kvtier_core.values import MissReason
from kvtier_fsspec import FsspecTier
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.tiers import assert_contents
from tests.tiers.engine import TierEngine
from tests.tiers.fsspec_rules import A, B, C, FsspecTests, load, make_tier, store_until_it_works
from tests.tiers.held import num_held
from tests.tiers.s3_server import KEY, SECRET, S3Server, client, held, options, refusal

HERE = Path(__file__).parent
MAKER = RowMaker("ns", 5000)


@pytest.fixture(scope="module")
def running():
    server = S3Server()
    server.client().create_bucket(Bucket="bucket")
    yield server
    server.stop()


@pytest.fixture
def server(running):
    yield running
    running.fault = None


@pytest.fixture
def url():
    return f"s3://bucket/{secrets.token_hex(8)}"


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    """No credentials on this machine, and nobody to ask for them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


class TestS3(FsspecTests):
    full_rounds = 4

    @pytest.fixture
    def tier_settings(self, server, url):
        return {"url": url, "storage_options": server.options}


def rows(*keys):
    return {key: MAKER.make(key) for key in keys}


def drive(url: str, storage_options: dict[str, object], **settings: object) -> TierDriver:
    return TierDriver(
        FsspecTier,
        FsspecTier.Settings.model_validate(
            {"type": "fsspec", "url": url, "storage_options": storage_options, **settings}
        ),
        row_bytes=MAKER.row_bytes,
        namespace="ns",
        name="far",
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def keys_in(server: S3Server, url: str) -> list[str]:
    prefix = url.removeprefix("s3://bucket/")
    answer = server.client().list_objects_v2(Bucket="bucket", Prefix=prefix)
    return [item["Key"].removeprefix(f"{prefix}/") for item in answer.get("Contents", ())]


# Opening.


def test_c33_a_missing_bucket_is_refused(server):
    with pytest.raises(
        TierOpenError,
        match=r"'far' \(kvtier-fsspec\): can't use s3://nobody/x: .*bucket does not exist; create the bucket",
    ):
        drive("s3://nobody/x", server.options)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
        ("SignatureDoesNotMatch", "The request signature we calculated does not match."),
        ("AccessDenied", "Access Denied"),
    ],
)
def test_c33_wrong_credentials_are_refused(server, url, code, message):
    server.fault = lambda environ: refusal("403 Forbidden", code, message)
    with pytest.raises(TierOpenError, match=f"PermissionError: {message}; check the credentials") as caught:
        drive(url, server.options)
    assert KEY not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_c33_a_bucket_that_may_be_written_and_not_read_is_refused(server, url):
    server.fault = lambda environ: (
        refusal("403 Forbidden", "AccessDenied", "Access Denied")
        if environ["REQUEST_METHOD"] == "GET"
        else None
    )
    with pytest.raises(TierOpenError, match="Access Denied; check the credentials"):
        drive(url, server.options)


@pytest.mark.usefixtures("no_credentials")
def test_c33_no_credentials_at_all_are_refused(server, url):
    without = {key: value for key, value in server.options.items() if key not in ("key", "secret")}
    with pytest.raises(TierOpenError, match="NoCredentialsError: .*; check the credentials"):
        drive(url, without)


def test_c33_a_server_that_is_down_is_refused(url):
    with pytest.raises(TierOpenError, match="EndpointConnectionError: .*; check that the server runs"):
        drive(url, options(free_port()))


def test_s13_a_server_that_is_down_is_named_by_host_and_port_and_no_credentials_are(url):
    port = free_port()
    with pytest.raises(TierOpenError) as caught:
        drive(url, options(port))
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert not [secret for secret in (KEY, SECRET) if secret in str(caught.value)]


@pytest.mark.parametrize("wrong", [{"endpoint_url": "nonsense"}, {"endpoint_ur": "http://127.0.0.1:1"}])
def test_k9_options_that_make_no_sense_are_refused(url, wrong):
    with pytest.raises(TierOpenError, match="; correct url or storage_options"):
        drive(url, {"key": KEY, "secret": SECRET, **wrong})


# Faults on the way.


def denied(environ):
    return refusal("403 Forbidden", "AccessDenied", "Access Denied")


def test_c33_faults_are_no_absence(server, url):
    with drive(url, server.options) as tier:
        tier.store(rows(A))
        server.fault = denied
        assert tier.wait(tier.start_lookup([A, B])).failed == (A, B)
        loaded = tier.load([A]).result
        assert loaded.failed == (A,)
        assert "PermissionError: Access Denied" in str(loaded.error)
        assert tier.store(rows(B)).failed == (B,)
        tier.discard([A])
        server.fault = None
        assert tier.store(rows(A, B)).error is None
        assert_contents(tier, rows(A, B), absent=[C])


@pytest.mark.usefixtures("no_credentials")
def test_k5_o3_an_expired_token_is_replaced_by_the_one_in_the_environment(server, url, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "kvtier")
    valid = "ASIAOLD"

    def expired(environ):
        if f"Credential={valid}/" in environ.get("HTTP_AUTHORIZATION", ""):
            return None
        return refusal("400 Bad Request", "ExpiredToken", f"The provided token {SECRET}-token has expired.")

    server.fault = expired
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIAOLD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"{SECRET}-token")
    without = {key: value for key, value in server.options.items() if key not in ("key", "secret")}
    with drive(url, without) as tier:
        assert tier.store(rows(A)).error is None
        valid = "ASIANEW"
        for _ in range(3):
            result = tier.store(rows(B))
            assert result.failed == (B,)
            assert "has expired" in str(result.error)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIANEW")
        store_until_it_works(tier, rows(B))
        assert_contents(tier, rows(A, B), absent=[C])


def hang_up(environ, start_response):
    """As a server that dies: the connection ends without an answer."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    start_response("200 OK", [])
    return []


def test_c33_connections_that_are_cut_fail_jobs_and_nothing_else(server, url):
    with drive(url, server.options) as tier:
        tier.store(rows(A))
        server.fault = lambda environ: hang_up
        assert tier.store(rows(B)).failed == (B,)
        assert tier.load([A]).result.failed == (A,)
        server.fault = None
        assert tier.store(rows(A, B)).error is None
        assert_contents(tier, rows(A, B))


def test_c33_a_connection_that_is_cut_once_is_tried_again(server, url):
    with drive(url, server.options) as tier:
        cut = iter([hang_up])
        server.fault = lambda environ: next(cut, None)
        assert tier.store(rows(A)).error is None
        cut = iter([hang_up])
        assert_contents(tier, rows(A))


def test_k2_an_answer_that_ends_half_way_is_a_fault(server, url):
    def half(environ, start_response):
        start_response("206 Partial Content", [("Content-Length", str(MAKER.row_bytes))])
        return [MAKER.make(A)[:4000]]

    with drive(url, server.options) as tier:
        tier.store(rows(A))
        server.fault = lambda environ: half if environ["REQUEST_METHOD"] == "GET" else None
        assert tier.load([A]).result.failed == (A,)
        server.fault = None
        tier.store(rows(A))
        assert_contents(tier, rows(A))


def test_k2_o3_a_put_that_is_cut_half_way_publishes_nothing(server, url):
    def cut(environ, start_response):
        environ["wsgi.input"].read(2000)
        return hang_up(environ, start_response)

    with drive(url, server.options) as tier:
        server.fault = lambda environ: cut if environ["REQUEST_METHOD"] == "PUT" else None
        assert tier.store(rows(A)).failed == (A,)
        server.fault = None
        assert keys_in(server, url) == ["ns/namespace.json"]
        assert tier.lookup([A]) == [False]
        assert num_held(tier) == 0
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A))


class Killable:
    """A server in a process of its own, always on one port, with one bucket."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, HERE / "s3_server.py", str(self.port)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline().strip() == str(self.port)
        client(self.port).create_bucket(Bucket="bucket")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


@pytest.fixture
def killable():
    server = Killable()
    yield server
    server.kill()


def test_c33_a_server_killed_at_work_fails_jobs_and_serves_again_when_it_is_back(killable, url):
    many = rows(*similar_keys(20, seed=1))
    with drive(url, options(killable.port)) as tier:
        assert tier.store(rows(A)).error is None
        store = tier.start_store(many)
        killable.kill()
        stored = tier.wait(store)
        assert stored.failed
        assert tier.load([B]).result.failed == (B,)
        killable.start()
        assert_contents(tier, {}, absent=[A])  # it kept its objects in memory
        assert tier.store(rows(A, B)).error is None
        assert_contents(tier, rows(A, B), absent=[C])


# Requests.


def test_c33_an_absent_block_costs_one_request(server, url):
    tier = make_tier({"url": url, "storage_options": server.options})
    tier.open()
    server.requests.clear()
    assert tier.contains([A, B, C]) == [False] * 3
    assert load(tier, A) is None
    assert [method for method, _ in server.requests] == ["GET"] * 4


def test_s11_a_second_node_asks_and_stores_nothing_that_is_there(server, url):
    keys = similar_keys(10)
    with (
        TierEngine(FsspecTier, url=url, storage_options=server.options, threads=2) as one,
        TierEngine(FsspecTier, url=url, storage_options=server.options, threads=2) as other,
    ):
        one.store("s", keys[:6])
        server.requests.clear()
        other.store("s", keys)  # it computed them without asking before
        methods = [method for method, path in server.requests if path.endswith(".kv")]
        assert methods == [*["GET"] * 7, *["PUT"] * 4], "nobody asks behind the first block that is not there"
        assert other.load("l", keys) == len(keys)


def test_s11_blocks_that_could_not_be_read_are_stored_over(server, url):
    with drive(url, server.options) as one, drive(url, server.options) as other:
        one.store(rows(A))
        whole = f"bytes=0-{MAKER.row_bytes}"
        server.fault = lambda environ: (
            refusal("403 Forbidden", "InvalidObjectState", "Not valid for the object's storage class")
            if environ.get("HTTP_RANGE") == whole
            else None
        )
        assert other.load([A]).result.failed == (A,)
        server.fault = None
        server.requests.clear()
        assert other.store(rows(A)).held == ()
        assert [method for method, path in server.requests if path.endswith(".kv")] == ["PUT"]


def test_c29_large_blocks_travel_in_one_request(server, url):
    maker = RowMaker("ns", 3 << 20)
    tier = make_tier({"url": url, "storage_options": server.options}, row_bytes=maker.row_bytes)
    tier.open()
    server.requests.clear()
    tier.store(A, memoryview(maker.make(A)))
    assert load(tier, A) == maker.make(A)
    assert [method for method, _ in server.requests] == ["PUT", "GET"]
    tier.close()


# Many at a time.


@pytest.mark.parametrize("parallel_requests", [3, 48])
def test_s3_as_many_lookups_and_deletes_are_under_way_as_set(server, url, parallel_requests):
    keys = similar_keys(200)
    tier = make_tier(
        {"url": url, "storage_options": server.options, "threads": 2, "parallel_requests": parallel_requests}
    )
    tier.open()
    for work in (tier.contains, tier.delete):
        server.fault = server.hold_until(parallel_requests)
        callers = [threading.Thread(target=work, args=(keys[begin::4],)) for begin in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(PATIENCE_S)
        assert server.most_under_way == parallel_requests, work.__name__


@pytest.mark.parametrize("threads", [2, 32])
def test_s3_as_many_blocks_are_loaded_and_stored_at_a_time_as_set(server, url, threads):
    many = rows(*similar_keys(100, seed=threads))
    with drive(url, server.options, threads=threads) as tier:
        server.fault = server.hold_until(threads - 1)  # one is kept from stores
        assert tier.store(many).error is None
        assert server.most_under_way == threads - 1
        server.fault = server.hold_until(threads)
        assert tier.load(list(many)).rows == many
        assert server.most_under_way == threads


def test_s3_what_storage_options_say_of_the_client_goes_first(server, url):
    options = {**server.options, "config_kwargs": {"max_pool_connections": 5}}
    tier = make_tier({"url": url, "storage_options": options, "parallel_requests": 48})
    tier.open()
    server.fault = server.hold_until(5)
    tier.contains(similar_keys(60))
    assert server.most_under_way == 5


# Lookups of many keys.


def test_s2_many_blocks_far_away_are_hits_at_the_first_or_second_try(server, url):
    keys = similar_keys(2000)
    with TierEngine(FsspecTier, num_rows=2500, url=url, storage_options=server.options, threads=16) as engine:
        path = f"/{url.removeprefix('s3://')}/{engine.namespace}"
        there = {f"{path}/{key.hex()[:2]}/{key.hex()}.kv": engine.maker.make(key) for key in keys}
        server.fault = held(there, 0.020)
        tries = [engine.load(str(number), keys) for number in range(2)]
        assert tries[1] > 0
        assert tries[1] >= tries[0]
        assert engine.reasons <= {MissReason.TIER_SLOW}, "what was not answered is not said to be absent"


# Several processes.


def test_k13_o2_a_forked_child_uses_the_tier(server, url):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, HERE / "fsspec_program.py", "fork", url, json.dumps(server.options)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr} after {time.monotonic() - begin:.1f} s"
