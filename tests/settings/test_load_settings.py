import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvtier.shown import show_settings
from kvtier_core import ConfigError, PluginError, load_settings
from tests.plugins.distributions import TIER_SOURCE

pytestmark = pytest.mark.usefixtures("_fake_tier")


@pytest.fixture
def _fake_tier(install_tier):
    install_tier("fake")


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "kvtier.toml"
        path.write_text(text)
        return path

    return write


def _load(file=None, environ=None, overrides=None):
    return load_settings(file=file, environ=environ or {}, overrides=overrides)


def _refused(error=ConfigError, **arguments):
    with pytest.raises(error) as caught:
        _load(**arguments)
    return str(caught.value)


TWO_TIERS = """
[tiers.warm]
type = "fake"
root = "/warm"
[tiers.cold]
type = "fake"
root = "/cold"
"""


def test_c53_without_any_source_the_defaults_hold():
    settings = _load()
    assert settings.pool.capacity == 1 << 30
    assert settings.pool.policy == "lru"
    assert settings.pool.block_size == 16
    assert (settings.pool.max_promotion, settings.pool.max_cascade) == (0.5, 0.5)
    assert settings.on_reset == "all"
    assert dict(settings.tiers) == {}
    assert set(settings.sources.values()) == {"default"}


@pytest.mark.parametrize(
    ("in_file", "in_environment", "in_overrides", "capacity", "source"),
    [
        (False, False, False, 1 << 30, "default"),
        (True, False, False, 2 << 30, "file:"),
        (True, True, False, 3 << 30, "env:KVTIER_POOL__CAPACITY"),
        (True, True, True, 4 << 30, "init"),
        (True, False, True, 4 << 30, "init"),
        (False, True, False, 3 << 30, "env:KVTIER_POOL__CAPACITY"),
    ],
)
def test_c53_init_beats_environment_beats_file_beats_default(
    config, in_file, in_environment, in_overrides, capacity, source
):
    settings = _load(
        file=config('[pool]\ncapacity = "2GiB"') if in_file else None,
        environ={"KVTIER_POOL__CAPACITY": "3GiB"} if in_environment else {},
        overrides={"pool": {"capacity": "4GiB"}} if in_overrides else None,
    )
    assert settings.pool.capacity == capacity
    assert settings.sources["pool.capacity"].startswith(source)


def test_c53_kvtier_config_names_the_file_when_none_is_given(config, tmp_path):
    file = config("[pool]\nblock_size = 8")
    assert _load(environ={"KVTIER_CONFIG": str(file)}).pool.block_size == 8
    other = tmp_path / "other.toml"
    other.write_text("[pool]\nblock_size = 4")
    assert _load(file=other, environ={"KVTIER_CONFIG": str(file)}).pool.block_size == 4


def test_c53_sources_merge_name_by_name(config):
    settings = _load(
        file=config(TWO_TIERS + '[tiers.cold.limits]\nload_timeout = "5s"\n'),
        environ={
            "KVTIER_TIERS__COLD__LIMITS__STORE_TIMEOUT": "7s",
            "KVTIER_TIERS__WARM__HOSTS": '["a", "b"]',
        },
        overrides={"tiers": {"cold": {"ttl": "1h"}}, "on_reset": "pool"},
    )
    cold = settings.tiers["cold"]
    assert (cold.limits.load_timeout, cold.limits.store_timeout, cold.ttl) == (5.0, 7.0, 3600.0)
    assert settings.tiers["warm"].hosts == ["a", "b"]
    assert (
        settings.sources["tiers.cold.limits.store_timeout"] == "env:KVTIER_TIERS__COLD__LIMITS__STORE_TIMEOUT"
    )
    assert settings.sources["tiers.cold.root"].startswith("file:")
    assert settings.sources["tiers.cold.ttl"] == "init"
    assert settings.sources["on_reset"] == "init"
    assert settings.on_reset == "pool"


def test_c53_options_from_the_environment_are_json_and_merge(config):
    settings = _load(
        file=config(TWO_TIERS + 'storage_options = {region = "eu", key = "file"}'),
        environ={"KVTIER_TIERS__COLD__STORAGE_OPTIONS": '{"key": "environment"}'},
    )
    assert settings.tiers["cold"].storage_options == {"region": "eu", "key": "environment"}
    message = _refused(file=config(TWO_TIERS), environ={"KVTIER_TIERS__COLD__STORAGE_OPTIONS__KEY": "x"})
    assert "set KVTIER_TIERS__COLD__STORAGE_OPTIONS to a JSON object" in message
    message = _refused(file=config(TWO_TIERS), environ={"KVTIER_TIERS__COLD__HOSTS": "a,b"})
    assert "KVTIER_TIERS__COLD__HOSTS: expected JSON" in message


def test_c53_every_tier_gets_its_own_types_settings(config):
    settings = _load(file=config(TWO_TIERS))
    assert type(settings.tiers["cold"]).__module__ == "kvtier_fake_module"
    assert settings.tier_types["cold"].distribution == "kvtier-fake"
    assert settings.tiers["cold"].root == "/cold"


def test_c50_only_configured_types_are_imported(install_tier, config):
    import sys

    install_tier("unused", source="raise RuntimeError")
    _load(file=config(TWO_TIERS))
    assert "kvtier_unused_module" not in sys.modules


# ------------------------------------------------------------------------------------------------------ order of tiers


def test_c53_the_order_is_that_of_the_file(config):
    assert list(_load(file=config(TWO_TIERS)).tiers) == ["warm", "cold"]
    settings = _load(file=config("lookup_order = ['cold', 'warm']\n" + TWO_TIERS))
    assert list(settings.enabled_tiers) == ["cold", "warm"]
    settings = _load(file=config(TWO_TIERS), environ={"KVTIER_LOOKUP_ORDER": '["cold", "warm"]'})
    assert list(settings.tiers) == ["cold", "warm"]


@pytest.mark.parametrize("through", ["environment", "overrides"])
def test_c53_without_a_file_two_tiers_need_lookup_order(through):
    environ: dict[str, str] = {}
    overrides: dict[str, Any] = {}
    for name in ("one", "two"):
        if through == "environment":
            environ |= {
                f"KVTIER_TIERS__{name.upper()}__TYPE": "fake",
                f"KVTIER_TIERS__{name.upper()}__ROOT": "/r",
            }
        else:
            overrides.setdefault("tiers", {})[name] = {"type": "fake", "root": "/r"}
    message = _refused(environ=environ, overrides=overrides)
    assert message.startswith("lookup_order: is required")
    assert '["one", "two"]' in message
    settings = _load(environ=environ, overrides=overrides | {"lookup_order": ["two", "one"]})
    assert list(settings.tiers) == ["two", "one"]


def test_c53_one_tier_beside_a_file_comes_last(config):
    environ = {"KVTIER_TIERS__EXTRA__TYPE": "fake", "KVTIER_TIERS__EXTRA__ROOT": "/x"}
    assert list(_load(file=config(TWO_TIERS), environ=environ).tiers) == ["warm", "cold", "extra"]


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("['warm']", "leaves out the enabled tier 'cold'"),
        ("['warm', 'cold', 'warm']", "names 'warm' twice"),
        ("['warm', 'cold', 'old']", "names 'old', which is not a configured tier (configured: cold, warm)"),
    ],
)
def test_c53_a_lookup_order_that_does_not_fit_is_refused(config, order, problem):
    assert problem in _refused(file=config(f"lookup_order = {order}\n" + TWO_TIERS))


def test_c53_disabled_tiers_are_checked_but_take_no_part(config):
    settings = _load(file=config(TWO_TIERS), environ={"KVTIER_TIERS__WARM__ENABLED": "false"})
    assert list(settings.enabled_tiers) == ["cold"]
    assert list(settings.tiers) == ["cold", "warm"]
    message = _refused(
        file=config(TWO_TIERS),
        environ={"KVTIER_TIERS__WARM__ENABLED": "false", "KVTIER_TIERS__WARM__THREADS": "0"},
    )
    assert "tiers.warm.threads" in message


def test_k10_o1_a_broken_plugin_stops_the_start_only_if_it_is_used(install_tier, config):
    install_tier("broken", source="raise ImportError('libfoo.so is missing')")
    file = config(TWO_TIERS + "[tiers.bad]\ntype = 'broken'\nanything = 1\n")
    message = _refused(PluginError, file=file)
    assert message.startswith("tiers.bad.type: tier type 'broken' of kvtier-broken 1.0")
    assert "libfoo.so is missing" in message
    settings = _load(file=file, environ={"KVTIER_TIERS__BAD__ENABLED": "0", "KVTIER_TIERS__BAD__OTHER": "1"})
    assert list(settings.tiers) == ["warm", "cold"]
    assert "libfoo.so" in settings.unavailable["bad"]


# ------------------------------------------------------------------------------------------------------- unknown names


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("KVTIER_POL__CAPACITY", "KVTIER_POOL__CAPACITY"),
        ("KVTIER_POOL_CAPACITY", "KVTIER_POOL__CAPACITY"),
        ("KVTIER_POOL__capacity", "KVTIER_POOL__CAPACITY"),
        ("KVTIER_TIERS__COLDD__ROOT", "KVTIER_TIERS__COLD__ROOT"),
        ("KVTIER_TIERS__COLD__ROT", "KVTIER_TIERS__COLD__ROOT"),
        ("KVTIER_TIERS__COLD__LIMITS__LOAD_TIMOUT", "KVTIER_TIERS__COLD__LIMITS__LOAD_TIMEOUT"),
        ("KVTIER_TIER__COLD__ROOT", "KVTIER_TIERS__COLD__ROOT"),
        ("KVTIER_ONRESET", "KVTIER_ON_RESET"),
        ("KVTIER_CONFG", "KVTIER_CONFIG"),
        ("KVTIER_POOL__CAPACITY__X", "KVTIER_POOL__CAPACITY"),
    ],
)
def test_k9_o1_an_unknown_variable_is_an_error_naming_the_nearest(config, variable, nearest):
    message = _refused(file=config(TWO_TIERS), environ={variable: "1GB"})
    assert message == f"{variable}: unknown environment variable; did you mean {nearest!r}?"


@pytest.mark.parametrize(
    "variable", ["KVTIER_", "KVTIER___", "KVTIER_TIERS", "KVTIER_TIERS__", "KVTIER_TIERS__COLD"]
)
def test_k9_o1_a_variable_that_names_no_value_is_an_error(config, variable):
    assert f"{variable}: unknown environment variable" in _refused(
        file=config(TWO_TIERS), environ={variable: "x"}
    )


def test_k9_o1_a_variable_that_names_a_table_says_what_to_set(config):
    message = _refused(file=config(TWO_TIERS), environ={"KVTIER_POOL": "x"})
    assert "it names a table: set its values, such as KVTIER_POOL__BLOCK_SIZE" in message


def test_c53_what_kubernetes_injects_is_ignored_and_listed():
    injected = {
        "KVTIER_SERVICE_HOST": "10.0.0.1",
        "KVTIER_SERVICE_PORT": "80",
        "KVTIER_SERVICE_PORT_HTTP": "80",
        "KVTIER_PORT": "tcp://10.0.0.1:80",
        "KVTIER_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVTIER_PORT_80_TCP_PROTO": "tcp",
        "KVTIER_PORT_80_TCP_PORT": "80",
        "KVTIER_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVTIER_METRICS_SERVICE_HOST": "10.0.0.2",
    }
    assert _load(environ=injected).ignored_variables == tuple(sorted(injected))


def test_c53_other_programs_variables_are_no_business_of_ours():
    assert _load(environ={"KVTIERX": "1", "XKVTIER_POOL": "1", "PATH": "/bin"}).ignored_variables == ()


@pytest.mark.parametrize(
    ("text", "place", "nearest"),
    [
        ("onreset = 'all'", "onreset", "on_reset"),
        ("[pol]\ncapacity = 1", "pol.capacity", None),
        ("[pool]\ncapcity = 1", "pool.capcity", "capacity"),
        (TWO_TIERS + "rot = 1", "tiers.cold.rot", "root"),
        (TWO_TIERS + "[tiers.cold.limits]\nload_timout = 1", "tiers.cold.limits.load_timout", "load_timeout"),
    ],
)
def test_k9_o3_an_unknown_key_is_an_error_naming_the_nearest_and_the_valid(config, text, place, nearest):
    message = _refused(file=config(text))
    assert place.split(".")[0] in message
    if nearest is not None:
        assert f"{place} (file:" in message
        assert f"did you mean {nearest!r}?" in message
        assert re.search(rf"\(valid: .*\b{nearest}\b", message)


def test_k9_o3_a_top_setting_inside_a_table_is_told_where_it_belongs(config):
    message = _refused(file=config(TWO_TIERS + "on_reset = 'pool'"))
    assert "tiers.cold.on_reset" in message
    assert "above the first [table]" in message


def test_k9_o3_an_unknown_tier_type_names_the_nearest(config):
    message = _refused(PluginError, file=config("[tiers.cold]\ntype = 'fakt'"))
    assert message.startswith("tiers.cold.type: unknown tier type 'fakt'; did you mean 'fake'?")


@pytest.mark.parametrize("name", ["NVMe2", "a__b", "_a", "2nd", "a-b", "a_"])
def test_c53_a_tier_name_that_no_variable_could_reach_is_refused(config, name):
    message = _refused(file=config(f"[tiers.{name}]\ntype = 'fake'\nroot = '/'"))
    assert message.startswith(f"tiers.{name}: a tier's name is")


def test_c53_f3_no_tier_goes_by_the_name_of_the_pool(config):
    assert _refused(file=config("[tiers.pool]\ntype = 'fake'")).startswith(
        "tiers.pool: hits and events of the pool"
    )


def test_c53_single_underscores_in_tier_names_are_reached(config):
    file = config("[tiers.nvme_2]\ntype = 'fake'\nroot = '/'")
    assert _load(file=file, environ={"KVTIER_TIERS__NVME_2__ROOT": "/env"}).tiers["nvme_2"].root == "/env"


# ------------------------------------------------------------------------------------------------------- wrong values


def test_k9_o4_all_problems_are_told_at_once(config):
    message = _refused(
        file=config(
            "[pool]\ncapacity = 'much'\n[tiers.a]\ntype = 'fake'\n[tiers.b]\ntype = 'nope'\n[tiers.c]\n"
        ),
        environ={"KVTIER_POOL__BLOCK_SIZE": "0", "KVTIER_X": "1"},
        overrides={"pool": {"max_cascade": 2}},
    )
    assert message.startswith("7 problems in the configuration:")
    for part in (
        r'pool\.capacity \(file:.*\): expected a quantity such as "8GiB"',
        r"tiers\.a\.root: is required: set it in \[tiers\.a\] or as KVTIER_TIERS__A__ROOT",
        r"tiers\.b\.type: unknown tier type 'nope'",
        r"tiers\.c\.type: is required",
        r"pool\.block_size \(env:KVTIER_POOL__BLOCK_SIZE\): must be at least 1, not 0",
        r"KVTIER_X: unknown",
        r"pool\.max_cascade \(init\): must be at most 1, not 2",
    ):
        assert re.search(part, message), part


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pool = 3", "pool: must be a table"),
        ("tiers = 3", "tiers: must be a table"),
        ("[tiers]\ncold = 3", "tiers.cold: must be a table"),
        ("[tiers.cold]\ntype = 3", "tiers.cold.type: must be a text"),
        (TWO_TIERS + "limits = 3", "tiers.cold.limits"),
        ("on_reset = 'everything'", "on_reset"),
        ("lookup_order = 'cold'", "lookup_order"),
    ],
)
def test_c53_a_value_of_the_wrong_shape_is_refused(config, text, problem):
    assert problem in _refused(file=config(text))


def test_c53_a_file_that_is_not_toml_is_named_with_the_line(config, tmp_path):
    message = _refused(file=config('[pool]\ncapacity = "1GiB\n'))
    assert re.search(r"kvtier\.toml, line 2, column \d+: not valid TOML", message)
    missing = tmp_path / "missing.toml"
    assert str(missing) in _refused(file=missing)
    assert "No such file" in _refused(environ={"KVTIER_CONFIG": str(missing)})
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# caf\xe9")
    assert "not UTF-8" in _refused(file=latin)
    assert re.search(
        r"kvtier\.toml: not valid TOML: nested too deep", _refused(file=config("a = " + "[" * 100_000))
    )
    assert str(tmp_path) in _refused(file=tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[pool]\ncapacity = 0", 'pool.capacity .*hold no block .*try "1GiB"'),
        ("[pool]\ncapacity = '2KiB'", "pool.capacity .*hold no block"),
        ("[pool]\npolicy = 'lri'", "pool.policy .*unknown eviction policy 'lri'"),
        ("[pool]\nmax_promotion = 0", "pool.max_promotion .*more than 0"),
        (TWO_TIERS + "capacity = 100", "tiers.cold.capacity .*hold no block"),
        (TWO_TIERS + "ttl = 0", "tiers.cold.ttl .*leave it out"),
        (TWO_TIERS + "policy = 'lri'", "tiers.cold.policy .*unknown eviction policy"),
        (TWO_TIERS + "limits = {load_timeout = 0}", "tiers.cold.limits.load_timeout .*more than 0"),
        (
            TWO_TIERS + "limits = {max_cascade = 0.9}",
            "tiers.cold.limits.max_cascade .*more than pool.max_cascade",
        ),
    ],
)
def test_c54_nonsense_is_refused_with_what_to_change(config, text, problem):
    assert re.search(problem, _refused(file=config(text)))


@pytest.mark.parametrize(
    ("info", "setting", "problem"),
    [
        (
            'bounded_by="tier"',
            'ttl = "1h"',
            "tiers.cold.ttl .*a tier of type 'own' does not end older blocks",
        ),
        ('bounded_by="storage"', 'ttl = "1h"', "tiers.cold.ttl .*nobody would keep to it"),
        (
            'bounded_by="storage"',
            'capacity = "1GiB"',
            "tiers.cold.capacity .*a limit of its own; leave it out",
        ),
        ('bounded_by="storage"', 'policy = "lru"', "tiers.cold.policy .*nobody would keep to it"),
    ],
)
def test_i21_c55_a_setting_that_nobody_enforces_is_refused(install_tier, config, info, setting, problem):
    install_tier("own", source=TIER_SOURCE.replace("default_capacity=8 << 20", info))
    text = f'[tiers.cold]\ntype = "own"\nroot = "/cold"\n{setting}\n'
    assert re.search(problem, _refused(file=config(text)))
    _load(file=config(text.replace(setting, "")))


@pytest.mark.parametrize(
    ("info", "setting"),
    [
        ('bounded_by="tier", ttl_by="tier"', 'ttl = "1h"'),
        ('bounded_by="storage", ttl_by="tier"', 'ttl = "1h"'),
        ('bounded_by="tier"', 'capacity = "1GiB"\npolicy = "lru"'),
        ('bounded_by="core"', 'capacity = "1GiB"\npolicy = "lru"\nttl = "1h"'),
    ],
)
def test_i21_c55_a_setting_that_somebody_enforces_is_taken(install_tier, config, info, setting):
    install_tier("own", source=TIER_SOURCE.replace("default_capacity=8 << 20", info))
    _load(file=config(f'[tiers.cold]\ntype = "own"\nroot = "/cold"\n{setting}\n'))


@pytest.mark.parametrize(
    ("value", "problem"), [("cold", "should match pattern"), ("/much/too/long", "at most 8 characters")]
)
def test_c53_a_plugins_own_bound_on_a_text_is_told_as_it_is(install_tier, config, value, problem):
    bounded = TIER_SOURCE.replace("root: str", 'root: str = Field(pattern="^/", max_length=8)')
    install_tier("own", source=bounded)
    message = _refused(file=config(f'[tiers.cold]\ntype = "own"\nroot = "{value}"\n'))
    assert problem in message
    assert "must be a text" not in message


# ------------------------------------------------------------------------------------------------------------- showing


def test_c53_every_value_can_be_shown_with_its_source(config):
    shown = show_settings(_load(file=config(TWO_TIERS), environ={"KVTIER_POOL__CAPACITY": "1536MiB"}))
    by_name = {item.name: item for item in shown}
    assert (by_name["pool.capacity"].text, by_name["pool.capacity"].source) == (
        '"1536MiB"',
        "env:KVTIER_POOL__CAPACITY",
    )
    assert by_name["tiers.cold.limits.load_timeout"].text == '"30s"'
    assert by_name["tiers.cold.pause"].text == "-"
    assert (by_name["tiers.cold.capacity"].text, by_name["tiers.cold.capacity"].source) == (
        '"8MiB"',
        "default",
    )
    assert by_name["tiers.cold.chunk"].text == '"4KiB"'
    assert by_name["tiers.cold.root"].source.startswith("file:")
    assert set(by_name) == set(_load(file=config(TWO_TIERS)).sources)
    json.dumps([item.value for item in shown])


def test_c53_what_is_shown_can_be_read_again(config, tmp_path):
    settings = _load(
        file=config(TWO_TIERS), overrides={"pool": {"capacity": "5MiB"}, "tiers": {"cold": {"ttl": "90s"}}}
    )
    tables: dict[str, list[str]] = {}
    for item in show_settings(settings):
        derived = (
            item.name.endswith(".capacity") and item.source == "default"
        )  # the type's, where nothing is set
        if item.text not in ("-", '"{}"') and not derived:
            table, _, name = item.name.rpartition(".")
            tables.setdefault(table, []).append(f"{name} = {item.text}\n")
    again = tmp_path / "again.toml"
    again.write_text(
        "".join(f"[{table}]\n" * bool(table) + "".join(lines) for table, lines in tables.items())
    )
    reread = _load(file=again)
    assert reread.pool == settings.pool
    assert reread.tiers == settings.tiers


def test_c53_settings_are_frozen(config):
    settings = _load(file=config(TWO_TIERS))
    with pytest.raises(Exception, match="frozen"):
        settings.pool.capacity = 3
    with pytest.raises(Exception, match="cannot assign"):
        settings.on_reset = "pool"


def test_c53_the_processs_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("KVTIER_POOL__BLOCK_SIZE", "32")
    assert load_settings().pool.block_size == 32
    assert load_settings(environ={}).pool.block_size == 16


def test_c53_the_files_path_is_kept(config):
    file = config(TWO_TIERS)
    assert _load(file=file).file == Path(file)


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("POOL__BLOCK_SIZE", "0", "must be at least 1, not 0"),
        ("POOL__BLOCK_SIZE", "x", "must be a whole number, such as 16"),
        ("POOL__BLOCK_SIZE", "1.5", "must be a whole number, such as 16, not 1.5"),
        ("POOL__BLOCK_SIZE", "9" * 5000, "must be a whole number, such as 16"),
        ("POOL__MAX_CASCADE", "2", "must be at most 1, not 2"),
        ("POOL__MAX_CASCADE", "-1", "must be more than 0, not -1"),
        ("POOL__PREFAULT", "maybe", "must be true or false"),
        ("ON_RESET", "none", "must be 'all' or 'pool'"),
        ("TIERS__COLD__LIMITS__OPEN_RETRY", "0", "must be at least 0.01 seconds, not 0"),
        ("TIERS__COLD__THREADS", "0", "must be at least 1, not 0"),
        ("LOOKUP_ORDER", '"cold"', 'must be a list, such as ["a", "b"]'),
    ],
)
def test_b20_a_value_out_of_bounds_is_told_with_bound_value_and_example(config, variable, text, problem):
    message = _refused(file=config(TWO_TIERS), environ={f"KVTIER_{variable}": text})
    assert message.endswith(f" (env:KVTIER_{variable}): {problem}")


@pytest.mark.parametrize("text", ['{"a": 1}', '{"a": {"b": 2}}', "{}", "3"])
def test_b13_a_table_where_a_list_belongs_names_the_variable_and_speaks_of_lists(config, text):
    message = _refused(file=config(TWO_TIERS), environ={"KVTIER_LOOKUP_ORDER": text})
    assert message.startswith('lookup_order (env:KVTIER_LOOKUP_ORDER): must be a list, such as ["a", "b"]')
    assert "tuple" not in message


def test_b13_the_same_in_a_file(config):
    file = config(TWO_TIERS.replace("[tiers.warm]", "lookup_order = {a = 1}\n[tiers.warm]", 1))
    assert _refused(file=file) == f'lookup_order (file:{file}): must be a list, such as ["a", "b"]'


def test_b13_two_tiers_by_environment_are_told_how_to_order_them():
    kinds = {f"KVTIER_TIERS__{name}__{key}": value for name in "AB" for key, value in FAKE.items()}
    message = _refused(environ=kinds)
    order = message[message.index("KVTIER_LOOKUP_ORDER='") :].split("'")[1]
    assert _load(environ={**kinds, "KVTIER_LOOKUP_ORDER": order}).lookup_order == ("a", "b")


FAKE = {"TYPE": "fake", "ROOT": "/"}


def test_b19_promotions_that_may_hold_more_than_all_loading_are_refused(config):
    message = _refused(file=config("[pool]\nmax_promotion = 0.8"))
    assert re.search(r"pool\.max_promotion.*must be at most 0.75, not 0.8", message)
    _load(file=config("[pool]\nmax_promotion = 0.75"))


@pytest.mark.parametrize(
    ("table", "name"),
    [("pool", name) for name in ("lease_timeout", "max_loading", "break_even_margin", "copy_threads")]
    + [("tiers.cold.limits", name) for name in ("breaker_pause", "retries", "max_batch", "presence_ttl")],
)
def test_c53_a_limit_that_is_no_setting_any_more_is_an_unknown_setting(config, table, name):
    before = TWO_TIERS if table.startswith("tiers") else ""
    message = _refused(file=config(f"{before}[{table}]\n{name} = 1"))
    assert f"{table}.{name}" in message
    assert "unknown setting" in message
