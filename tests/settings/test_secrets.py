import logging
import traceback
from typing import Any

import pytest

from kvtier.shown import show_settings
from kvtier_core import KvtierError, load_settings
from kvtier_core.masking import MASK, mask_text, mask_value, secrets_in_text
from kvtier_core.runtime import plan_tier
from kvtier_core.tier import secrets_in_options
from tests.plugins.distributions import TIER_SOURCE

SECRET = "hunter2-very-secret"

LEAKY = (
    TIER_SOURCE.replace(
        "    pause: Duration | None = None\n", "    pause: Duration | None = None\n    mode: str = 'ok'\n"
    )
    + """

def leak(cls, value):
    raise ValueError(f"can't use {value!r}")

def leak_all(cls, data):
    if "explode" in str(data.get("mode")):
        raise RuntimeError(f"bad: {data}")
    if "tell" in str(data.get("mode")):
        raise ValueError(f"bad: {data}")
    return data

class Leaky(Settings):
    check_url = field_validator("url")(classmethod(leak))
    check_all = model_validator(mode="before")(classmethod(leak_all))

class LeakyTier(Tier):
    Settings = Leaky
"""
)


@pytest.fixture(autouse=True)
def _tiers(install_tier):
    install_tier("fake")
    install_tier("leaky", source=LEAKY, target="LeakyTier")


def _everything_said(error):
    return (
        "".join(traceback.format_exception(error))
        + repr(error)
        + str(error.__dict__)
        + repr(error.__context__)
    )


def _file(tmp_path, text):
    file = tmp_path / "kvtier.toml"
    file.write_text(text)
    return file


BAD_PLACES = {
    "a secret beside a missing field": f"type = 'fake'\npassword = '{SECRET}'",
    "a secret beside an unknown key": f"type = 'fake'\nroot = '/'\nrot = '/'\npassword = '{SECRET}'",
    "a misspelt secret": f"type = 'fake'\nroot = '/'\npasword = '{SECRET}'",
    "a secret of the wrong type": f"type = 'fake'\nroot = '/'\npassword = ['{SECRET}']",
    "storage options of the wrong type": f"type = 'fake'\nroot = '/'\nstorage_options = {{key = ['{SECRET}']}}",
    "a url with a password": f"type = 'fake'\nurl = 's3://me:{SECRET}@host/path'",
    "a url with a slash in its password": f"type = 'leaky'\nroot = '/'\nurl = 's3://me:{SECRET}/x@host/path'",
    "a plugin's message about a url": f"type = 'leaky'\nroot = '/'\nurl = 's3://me:{SECRET}@host/path'",
    "a plugin's message about everything": f"type = 'leaky'\nroot = '/'\nmode = 'tell'\npassword = '{SECRET}'",
    "a plugin's own exception": f"type = 'leaky'\nroot = '/'\nmode = 'explode'\npassword = '{SECRET}'",
    "a url parameter": f"type = 'leaky'\nroot = '/'\nurl = 'https://host/?sig={SECRET}&x=1'",
    "a nested table in a plugin's message": f"type='leaky'\nroot='/'\nmode='tell'\naccount = {{password = '{SECRET}'}}",
    "nested tables in a plugin's message": f"type='leaky'\nroot='/'\nmode='tell'\naccounts = [{{auth = '{SECRET}'}}]",
    "named tables in a plugin's message": f"type='leaky'\nroot='/'\nmode='tell'\nnamed = {{a = {{auth = '{SECRET}'}}}}",
    "options in a plugin's message": f"type='leaky'\nroot='/'\nmode='tell'\nstorage_options = {{any = '{SECRET}'}}",
}


@pytest.mark.parametrize("text", BAD_PLACES.values(), ids=BAD_PLACES)
def test_k9_o2_no_error_shows_a_secret_from_a_file(tmp_path, text, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(KvtierError) as caught:
        load_settings(file=_file(tmp_path, f"[tiers.cold]\n{text}\n"), environ={})
    assert SECRET not in _everything_said(caught.value)
    assert SECRET not in caplog.text
    assert "tiers.cold" in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"KVTIER_TIERS__COLD__PASSWORD": SECRET},
        {"KVTIER_TIERS__COLD__URL": f"s3://me:{SECRET}@host"},
        {"KVTIER_TIERS__COLD__STORAGE_OPTIONS": f'{{"key": "{SECRET}"}}'},
        {"KVTIER_TIERS__COLD__STORAGE_OPTIONS": f'{{"key": "{SECRET}"'},
        {"KVTIER_TIERS__COLD__STORAGE_OPTIONS__KEY": SECRET},
        {"KVTIER_TIERS__COLD__PASWORD": SECRET},
        {"KVTIER_TIERS__COLD__THREADS": SECRET},
    ],
)
def test_k9_o2_no_error_shows_a_secret_from_the_environment(tmp_path, environ):
    with pytest.raises(KvtierError) as caught:  # root is missing in any case
        load_settings(file=_file(tmp_path, "[tiers.cold]\ntype = 'fake'\n"), environ=environ)
    assert SECRET not in _everything_said(caught.value)


def test_k9_o2_a_file_that_is_not_toml_is_not_quoted(tmp_path):
    with pytest.raises(KvtierError) as caught:
        load_settings(file=_file(tmp_path, f"[tiers.cold]\npassword = {SECRET}\n"), environ={})
    assert SECRET not in _everything_said(caught.value)
    assert "line 2" in str(caught.value)


def test_k9_o2_s17_valid_secrets_are_usable_but_never_shown(tmp_path):
    settings = load_settings(
        file=_file(
            tmp_path,
            f"[tiers.cold]\ntype = 'fake'\nroot = '/'\npassword = '{SECRET}'\n"
            f"url = 's3://me:{SECRET}@host/path'\nstorage_options = {{anything = '{SECRET}'}}\n"
            f"account = {{user = 'me', password = '{SECRET}'}}\n"
            f"accounts = [{{user = 'you', password = '{SECRET}'}}]\n"
            f"named = {{a = {{auth = '{SECRET}'}}}}\n",
        ),
        environ={},
    )
    cold: Any = settings.tiers["cold"]
    assert cold.password.get_secret_value() == SECRET
    assert cold.storage_options == {"anything": SECRET}
    build = plan_tier(settings, "cold", 4096)
    assert SECRET in build.secrets
    assert SECRET not in repr(build), "S17"
    for text in (repr(settings), str(cold), repr(cold), f"{cold}", str(show_settings(settings))):
        assert SECRET not in text
        assert "host/path" in text
        assert "you" in text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("s3://key:secret@host/x", f"s3://{MASK}@host/x"),
        ("no address at all: a@b", "no address at all: a@b"),
        ("https://host/x?token=abc&y=1", f"https://host/x?token={MASK}&y=1"),
        ("https://host/x?X-Amz-Signature=abc", f"https://host/x?X-Amz-Signature={MASK}"),
        ("https://host/x?tokens_per_block=16", "https://host/x?tokens_per_block=16"),
        ("see https://host/x and s3://u@h", f"see https://host/x and s3://{MASK}@h"),
    ],
)
def test_k9_o2_urls_are_masked(text, masked):
    assert mask_text(text) == masked


def test_k9_o2_a_short_secret_is_masked_only_where_it_stands_alone():
    assert mask_text("a key and a", {"key"}) == f"a {MASK} and a"
    assert mask_text("monkeys", {"key"}) == "monkeys"


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "aws_secret_access_key",
        "api_key",
        "apikey",
        "token",
        "auth-token",
        "PASSWD",
        "AWSAccessKeyId",
        "authToken",
    ],
)
def test_k9_o2_a_plain_text_whose_name_says_secret_is_masked(name):
    assert mask_value(name, "x") == MASK


@pytest.mark.parametrize(
    "name", ["max_tokens", "tokens_per_block", "keys", "root", "passes", "max_resident_keys"]
)
def test_k9_o2_other_names_are_not(name):
    assert mask_value(name, "x") == "x"


@pytest.mark.parametrize(
    ("options", "secret"),
    [
        ({"endpoint_url": "http://storage.example:9000"}, set()),
        ({"client_kwargs": {"endpoint_url": "https://storage.example/"}}, set()),
        ({"endpoint_url": f"http://me:{SECRET}@host:9000"}, {f"me:{SECRET}", SECRET}),
        ({"endpoint_url": f"http://host/{SECRET}"}, {f"http://host/{SECRET}"}),
        ({"endpoint_url": f"http://host?sig={SECRET}"}, {f"http://host?sig={SECRET}"}),
        ({"password": "http://host:1"}, {"http://host:1"}),
        ({"hosts": ["a", None, 7]}, {"a", "7"}),
        ({"key": SECRET, "anon": True}, {SECRET}),
    ],
)
def test_s13_of_connection_options_only_the_address_of_a_server_is_no_secret(options, secret):
    assert secrets_in_options(options) == secret


def test_c53_a_password_with_percent_signs_is_a_secret_as_servers_repeat_it_too():
    found = secrets_in_text("redis://me:super%2Fsecret%40pw@cache:6379/0")
    assert {"super%2Fsecret%40pw", "super/secret@pw"} <= found
