import json
import sys

import pytest

from kvtier.commands import list_commands
from kvtier.listing import list_plugins
from kvtier.main import main
from kvtier_core import ConfigError, PluginError, load_settings
from kvtier_core.plugins import load_tier_type
from kvtier_core.settings import read_blocklist

FAKE = "[tiers.cold]\ntype = 'fake'\nroot = '/'\n"


@pytest.fixture
def config(install_tier, tmp_path):
    install_tier("fake")

    def write(text):
        file = tmp_path / "kvtier.toml"
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize("spelling", ["kvtier-fake", "KVTier_Fake", "kvtier.fake"])
def test_c50_a_blocked_tier_type_is_not_imported_and_says_so(config, spelling):
    file = config(f"blocked_plugins = ['{spelling}']\n{FAKE}")
    with pytest.raises(
        PluginError, match=r"'fake' of kvtier-fake 1\.0 is blocked by the setting blocked_plugins"
    ):
        load_settings(file=file, environ={})
    assert "kvtier_fake_module" not in sys.modules


def test_c50_a_disabled_tier_of_a_blocked_plugin_stops_nothing(config):
    file = config(f"blocked_plugins = ['kvtier-fake']\n{FAKE}enabled = false\n")
    settings = load_settings(file=file, environ={})
    assert "blocked" in settings.unavailable["cold"]
    assert settings.blocked_plugins == ("kvtier-fake",)


def test_c50_blocking_one_of_two_settles_their_conflict(install_tier):
    install_tier("disk2", distribution="first-disk")
    install_tier("disk2", distribution="second-disk")
    assert load_tier_type("disk2", {"first-disk"}).distribution == "second-disk"
    statuses = {
        item.distribution: status for item, status in list_plugins({"first-disk"}) if item.name == "disk2"
    }
    assert statuses == {"first-disk": "blocked by the setting blocked_plugins", "second-disk": "available"}


def test_c50_blocked_names_are_not_suggested(install_tier):
    install_tier("fake")
    with pytest.raises(PluginError) as caught:
        load_tier_type("fakt", {"kvtier-fake"})
    assert "fake" not in str(caught.value)


def test_c53_the_environment_blocks_too_and_is_stronger(config):
    file = config(f"blocked_plugins = ['kvtier-fake']\n{FAKE}")
    assert load_settings(file=file, environ={"KVTIER_BLOCKED_PLUGINS": "[]"}).blocked_plugins == ()
    with pytest.raises(PluginError, match="blocked"):
        load_settings(file=config(FAKE), environ={"KVTIER_BLOCKED_PLUGINS": '["kvtier-fake"]'})


@pytest.mark.parametrize("text", ["blocked_plugins = 'kvtier-fake'\n", "blocked_plugins = [3]\n"])
def test_c53_a_malformed_list_is_refused(config, text):
    with pytest.raises(ConfigError, match="blocked_plugins"):
        load_settings(file=config(text), environ={})
    with pytest.raises(ConfigError, match="blocked_plugins: must be a list"):
        read_blocklist(config(text))


def test_k9_o3_a_name_that_is_no_distribution_is_refused_or_told(config, caplog):
    with pytest.raises(ConfigError, match="'fake' is no distribution .*block 'kvtier-fake'"):
        load_settings(file=config("blocked_plugins = ['fake']"), environ={})
    load_settings(file=config("blocked_plugins = ['kvtier-fak']"), environ={})
    assert "no plugin 'kvtier-fak' is installed; did you mean 'kvtier-fake'?" in caplog.text


COMMAND = """
help = "Say hello."
def add_arguments(parser): parser.add_argument("--config")
def run(args): return 0
"""


@pytest.fixture
def greet(site):
    site.install("greeter", {"kvtier.commands.v1": {"greet": "greeter_module"}}, {"greeter_module": COMMAND})


@pytest.mark.usefixtures("greet")
def test_c50_a_blocked_command_is_neither_listed_nor_run(config, capsys, monkeypatch):
    assert main(["greet"]) == 0
    file = config("blocked_plugins = ['greeter']")
    for arguments in (["greet", "--config", str(file)], ["greet", f"--config={file}"]):
        assert main(arguments) == 2
        assert (
            "command 'greet' of greeter 1.0 is blocked by the setting blocked_plugins"
            in capsys.readouterr().err
        )
    monkeypatch.setenv("KVTIER_CONFIG", str(file))
    assert main(["greet"]) == 2
    assert "greet" not in list_commands(read_blocklist())
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "greet" not in capsys.readouterr().out


def test_c50_list_shows_what_is_blocked(config, capsys):
    file = config("blocked_plugins = ['kvtier-fake']")
    assert main(["list", "--config", str(file), "--json"]) == 0
    status = {item["name"]: item["status"] for item in json.loads(capsys.readouterr().out)}
    assert status["fake"] == "blocked by the setting blocked_plugins"


def test_c50_list_has_policies_and_commands_too_and_imports_none(site, greet):
    site.install(
        "policies",
        {"kvtier.policies.v1": {"lru": "policies_module:P", "mru": "policies_module:P"}},
        {"policies_module": "1/0"},
    )
    status = {(item.group, item.name): text for item, text in list_plugins()}
    assert status["kvtier.policies.v1", "mru"] == "available"
    assert status["kvtier.policies.v1", "lru"] == "unusable: the built-in policy has that name"
    assert status["kvtier.commands.v1", "greet"] == "available"
    assert not {"policies_module", "greeter_module"} & set(sys.modules)


@pytest.mark.usefixtures("greet")
def test_help_is_shown_whatever_the_configuration_says(monkeypatch, capsys):
    monkeypatch.setenv("KVTIER_CONFIG", "absent.toml")
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "greet" in capsys.readouterr().out
