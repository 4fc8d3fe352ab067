from pathlib import Path

import pytest

from kvtier_core import ConfigError
from kvtier_vllm.options import OURS, VLLMS, read_options, read_tier_options

SPEC = {"spec_name": "KvtierSpec", "spec_module_path": "kvtier_vllm"}


def test_without_options_the_defaults_hold():
    options = read_options(SPEC)
    assert options.config is None
    assert options.open_timeout_s == 60
    assert options.load().pool.capacity == 1 << 30


def test_c53_the_table_is_stronger_than_the_file(tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text('[pool]\ncapacity = "2MiB"\nprefault = false\n')
    options = read_options({**SPEC, "kvtier_config": str(file), "kvtier": {"pool": {"capacity": "3MiB"}}})
    settings = options.load()
    assert settings.pool.capacity == 3 << 20
    assert not settings.pool.prefault


@pytest.mark.parametrize("name", ["cpu_bytes_to_use", "kvtier_cfg", "secondary_tiers"])
def test_k9_o2_k9_o3_an_unknown_option_is_refused_with_the_allowed_names(name):
    with pytest.raises(ConfigError) as raised:
        read_options({**SPEC, name: "a secret"})
    message = str(raised.value)
    assert repr(name) in message
    assert "a secret" not in message
    assert all(allowed in message for allowed in OURS | VLLMS)


def test_k9_o3_an_unknown_setting_in_the_table_is_refused():
    with pytest.raises(ConfigError, match="pool.capasity"):
        read_options({**SPEC, "kvtier": {"pool": {"capasity": "1GiB"}}}).load()


@pytest.mark.parametrize("path", ["kvtier.toml", 5])
def test_the_path_of_the_configuration_is_absolute(path):
    with pytest.raises(ConfigError, match="absolute path"):
        read_options({**SPEC, "kvtier_config": path})


def test_a_table_must_be_a_table():
    with pytest.raises(ConfigError, match="must be a table") as raised:
        read_options({**SPEC, "kvtier": "a secret"})
    assert "a secret" not in str(raised.value)


def test_timeouts_are_typed():
    options = read_options({**SPEC, "kvtier_open_timeout": "2m", "kvtier_shutdown_timeout": 3})
    assert (options.open_timeout_s, options.shutdown_timeout_s) == (120, 3)
    with pytest.raises(ConfigError, match="kvtier_open_timeout"):
        read_options({**SPEC, "kvtier_open_timeout": "soon"})


def test_c02_edges_of_weight_files_are_trusted_by_request_alone():
    assert not read_options(SPEC).trusts_edges
    assert not read_options({**SPEC, "kvtier_weights_digest": "full"}).trusts_edges
    assert read_options({**SPEC, "kvtier_weights_digest": "edges"}).trusts_edges
    with pytest.raises(ConfigError, match="kvtier_weights_digest = True must be 'full' or 'edges'"):
        read_options({**SPEC, "kvtier_weights_digest": True})


def test_a_missing_file_is_told(tmp_path):
    missing = Path(tmp_path, "kvtier.toml")
    with pytest.raises(ConfigError, match="can't read"):
        read_options({**SPEC, "kvtier_config": str(missing)}).load()


def test_k9_o3_a_tier_behind_vllms_own_tiering_refuses_what_it_does_not_know_or_heed():
    options = read_tier_options({"kvtier_open_timeout": "5s", "kvtier_identity": "m", "locality": "LOCAL"})
    assert (options.open_timeout_s, options.identity) == (5, "m")
    assert read_tier_options({}).identity is None
    for name in ("cpu_bytes", "kvtier_weights_digest", "spec_name"):
        with pytest.raises(ConfigError, match=f"knows no '{name}'.*kvtier_identity"):
            read_tier_options({name: "a secret"})


@pytest.mark.parametrize("identity", ["", "  ", 5, True, []])
def test_v16_an_identity_that_says_nothing_is_refused_to_spec_and_tier(identity):
    with pytest.raises(ConfigError, match="kvtier_identity must be a text"):
        read_tier_options({"kvtier_identity": identity})
    with pytest.raises(ConfigError, match="kvtier_identity must be a text"):
        read_options({**SPEC, "kvtier_identity": identity})


def test_v16_an_engine_may_have_an_identity_too():
    assert read_options({**SPEC, "kvtier_identity": "mine at 8f3c"}).identity == "mine at 8f3c"
    assert read_options(SPEC).identity is None
