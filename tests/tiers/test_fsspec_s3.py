"""The object-store tier on moto's S3 server on loopback: every rule, credentials, and a server that is killed."""

import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from kvtier_core.errors import TierOpenError
from kvtier_fsspec.object_tier import ObjectTier
from kvtier_testing.driving import PATIENCE_S, TierDriver
from kvtier_testing.rows import RowMaker, similar_keys
from kvtier_testing.tiers import assert_contents
from tests.tiers.fsspec_rules import A, B, C, store_until_it_works
from tests.tiers.object_faults import ObjectFaults
from tests.tiers.object_rules import ObjectTests
from tests.tiers.s3_server import KEY, SECRET, S3Server, client, options, refusal

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
def server_port(server):
    return server.port


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


class TestMoto(ObjectTests):
    """Every test is in the base classes."""


class TestMotoFaults(ObjectFaults):
    """As above."""


def rows(*keys):
    return {key: MAKER.make(key) for key in keys}


def drive(url: str, storage_options: dict[str, object], **settings: object) -> TierDriver:
    return TierDriver(
        ObjectTier,
        ObjectTier.Settings.model_validate(
            {"type": "fsspec", "url": url, "storage_options": storage_options, **settings}
        ),
        row_bytes=MAKER.row_bytes,
        namespace="ns",
        name="far",
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# Credentials.


def without_key(server: S3Server) -> dict[str, object]:
    return {key: value for key, value in server.options.items() if key not in ("key", "secret")}


@pytest.mark.usefixtures("no_credentials")
def test_c33_no_credentials_at_all_are_refused(server, url):
    with pytest.raises(TierOpenError, match="no credentials, .*; check the credentials"):
        drive(url, without_key(server))


@pytest.mark.usefixtures("no_credentials")
def test_k5_o3_an_expired_token_is_replaced_by_the_one_in_the_environment(server, url, monkeypatch):
    valid = "ASIAOLD"

    def expired(environ):
        if f"Credential={valid}/" in environ.get("HTTP_AUTHORIZATION", ""):
            return None
        return refusal("400 Bad Request", "ExpiredToken", f"The provided token {SECRET}-token has expired.")

    server.fault = expired
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIAOLD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"{SECRET}-token")
    with drive(url, without_key(server)) as tier:
        assert tier.store(rows(A)).error is None
        valid = "ASIANEW"
        for _ in range(3):
            result = tier.store(rows(B))
            assert result.failed == (B,)
            assert "has expired" in str(result.error)
            assert SECRET not in str(result.error)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASIANEW")
        store_until_it_works(tier, rows(B))
        assert_contents(tier, rows(A, B), absent=[C])


def test_s13_a_server_that_is_down_is_named_by_host_and_port_and_no_credentials_are(url):
    port = free_port()
    with pytest.raises(TierOpenError, match="check that the server runs") as caught:
        drive(url, options(port))
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert not [secret for secret in (KEY, SECRET) if secret in str(caught.value)]


def test_s15_options_may_have_the_names_of_the_client(server, url):
    names: dict[str, object] = {
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "endpoint": f"http://127.0.0.1:{server.port}",
        "region": "us-east-1",
        "client_options": {"timeout": "20s"},
    }
    with drive(url, names) as tier:
        assert tier.store(rows(A)).error is None
        assert_contents(tier, rows(A), absent=[B])


# Many at a time.


@pytest.mark.parametrize("threads", [2, 32])
def test_s3_as_many_packs_are_loaded_and_stored_at_a_time_as_set(server, url, threads):
    maker = RowMaker("ns", 4_500_000)  # a pack each
    many = {key: maker.make(key) for key in similar_keys(2 * threads)}
    tier = TierDriver(
        ObjectTier,
        ObjectTier.Settings.model_validate(
            {"type": "fsspec", "url": url, "storage_options": server.options, "threads": threads}
        ),
        row_bytes=maker.row_bytes,
        namespace="ns",
    )
    with tier:
        server.fault = server.hold_until(threads - 1)  # one is kept from stores
        assert tier.store(many).error is None
        assert server.most_under_way >= threads - 1
        server.fault = server.hold_until(threads)
        assert tier.load(list(many)).rows == many
        assert threads <= server.most_under_way <= threads + 1, "the look at the bucket comes beside them"


# A server that is killed.


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
    with drive(url, options(killable.port), limits={"load_timeout": 6.0}) as tier:
        assert tier.store(rows(A)).error is None
        killable.kill()
        assert tier.store(many).failed
        assert tier.load([A]).result.failed == (A,)
        killable.start()  # it kept its objects in memory
        assert tier.store(rows(A, B)).error is None
        assert_contents(tier, rows(A, B), absent=[C])
