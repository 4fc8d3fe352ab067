"""What the Valkey tier's settings may say, and what a URL means."""

import pytest
from pydantic import ValidationError

from kvtier_valkey import ValkeySettings

PASSWORD = "test-valkey-password"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "localhost:6379"}, "url must begin with redis://"),
        ({"url": "http://localhost"}, "url must begin with redis://"),
        ({"url": "redis-cluster://a:1"}, "clusters are not followed; name one server.*or a proxy"),
        ({"url": "redis+cluster://a:1,b:2"}, "clusters are not followed"),
        ({"url": "redis+sentinel://a:1,b:2"}, "url names no primary: write redis.sentinel://"),
        ({"url": "redis+sentinel://a:1,b..c:2/main"}, "the host is no name"),
        ({"url": "redis+sentinel://a:1,b:x/main"}, "host and port can't be told apart"),
        ({"url": "unix+sentinel:///a"}, "url must begin with redis://"),
        ({"url": "redis://"}, "url names no server"),
        ({"url": "unix://"}, "url names no socket"),
        ({"url": "unix://tmp/socket"}, "url names no socket: write unix:///PATH, with three slashes"),
        ({"url": "redis://a:0"}, "url: a port is a number from 1 to 65535"),
        ({"url": "redis://a:65536"}, "url: a port is a number from 1 to 65535"),
        ({"url": f"redis://a:{'9' * 5000}"}, "url: a port is a number from 1 to 65535"),
        ({"url": "redis+sentinel://a:1,b:0/main"}, "url: a port is a number from 1 to 65535"),
        ({"url": "redis://::1:6379"}, r"url: write an IPv6 address in brackets, as in redis://\[::1\]:6379"),
        ({"url": "redis://fe80::1%eth0"}, "url: write an IPv6 address in brackets"),
        ({"url": "redis://::ffff:10.0.0.1/2"}, "url: write an IPv6 address in brackets"),
        ({"url": "redis://[host]:6379"}, "url: in brackets belongs an IPv6 address"),
        ({"url": "redis://[::1"}, "host and port can't be told apart"),
        ({"url": "redis://a:1#2"}, "url: nothing is read behind #; write it as %23"),
        ({"url": "redis://a:1,b:2"}, "url names several servers"),
        ({"url": "redis://:pass/word@a:1"}, "host and port can't be told apart.*%2F"),
        (
            {"url": "redis://a?decode_responses=yes"},
            "no option decode_responses of redis://; there are db, password",
        ),
        ({"url": "redis://a?ssl_cert_reqs=none"}, "no option ssl_cert_reqs of redis://"),
        ({"url": "rediss://a?ssl_ca_cert=x"}, "no option ssl_ca_cert of rediss://; .*ssl_ca_certs"),
        ({"url": "redis://a..b"}, "the host is no name"),
        ({"url": "rediss://.a"}, "the host is no name"),
        ({"url": f"redis://{'a' * 64}.b"}, "the host is no name"),
        ({"url": "redis://a/x"}, "the database must be a number"),
        ({"url": "redis://a/-1"}, "the database must be a number"),
        ({"url": "redis://a/1/2"}, "the database must be a number"),
        ({"url": "redis://a?db=1.5"}, "the database must be a number"),
        ({"url": "redis://a/99999999999999999999"}, "the database must be a number"),
        ({"url": "redis://a?db=1&db=2"}, "option db is there 2 times"),
        ({"url": "rediss://a?ssl_cert_reqs=no"}, "option ssl_cert_reqs must be required or optional or none"),
        ({"url": "rediss://a?ssl_keyfile=k"}, "ssl_keyfile needs ssl_certfile"),
        ({"url": "redis://a", "prefix": ""}, "prefix"),
    ],
)
def test_i19_settings_that_cannot_be_meant_are_refused(settings, says):
    with pytest.raises(ValidationError, match=says) as caught:
        ValkeySettings.model_validate({"type": "valkey", **settings})
    assert "pass" not in caught.value.errors()[0]["msg"].replace("password", "")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://[::1]:6380", "[::1]:6380"),
        ("redis://[::1]", "[::1]:6379"),
        ("redis://me:pw@[fe80::1%25eth0]:1/2", "[fe80::1%eth0]:1"),
        ("redis://A.example:65535/", "a.example:65535"),
        (" redis://a:\n", "a:6379"),
        ("redis+sentinel://a,[::1]:2/main", "main (of the sentinels a:26379, [::1]:2)"),
        ("unix:///a%23b", "/a#b"),
    ],
)
def test_i19_messages_name_a_server_as_its_url_does(url, address):
    assert ValkeySettings.model_validate({"type": "valkey", "url": url}).location.address == address


def test_i19_no_repr_holds_a_password():
    settings = ValkeySettings.model_validate(
        {"type": "valkey", "url": f"redis://me:{PASSWORD}@host", "password": "pass-word", "username": "u-ser"}
    )
    assert not [secret for secret in (PASSWORD, "pass-word", "u-ser") if secret in repr(settings)]
