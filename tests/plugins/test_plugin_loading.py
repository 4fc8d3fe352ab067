import subprocess
import sys

import pytest

from kvtier.commands import list_commands, load_command
from kvtier.listing import list_plugins
from kvtier_core import PluginError, load_tier_type

BROKEN = "raise ImportError('libfoo.so is missing')"
HOOKS = """
from kvtier_core.tier import TierInfo, TierSettings, hookimpl

class Tier:
    Settings = TierSettings
    info = TierInfo(medium="fake", bounded_by="tier")

    def __init__(self, settings, context): ...
    @hookimpl
    def lookup(self, job): ...
    @hookimpl
    def submit_store(self, {arguments}): ...
    @hookimpl
    def submit_load(self, job): ...
    @hookimpl
    def get_finished_jobs(self): return []
"""


def _status(name):
    return next(status for item, status in list_plugins() if item.name == name)


def test_c50_a_tier_type_is_loaded_by_name(install_tier):
    install_tier("fake")
    tier_type = load_tier_type("fake")
    assert (tier_type.name, tier_type.distribution, tier_type.version) == ("fake", "kvtier-fake", "1.0")
    assert tier_type.cls.__name__ == "Tier"


def test_c50_listing_imports_no_plugin(install_tier):
    install_tier("fake")
    assert _status("fake") == "available"
    assert "kvtier_fake_module" not in sys.modules


def test_c50_loading_one_type_imports_no_other(install_tier):
    install_tier("fake")
    install_tier("other")
    load_tier_type("fake")
    assert "kvtier_fake_module" in sys.modules
    assert "kvtier_other_module" not in sys.modules


def test_k10_o1_a_broken_plugin_harms_only_itself(install_tier):
    install_tier("good")
    install_tier("broken", source=BROKEN)
    install_tier("rude", source="import sys; sys.exit(3)")
    assert load_tier_type("good").name == "good"
    with pytest.raises(
        PluginError, match=r"'broken' of kvtier-broken 1\.0 .*ImportError: libfoo\.so is missing"
    ) as caught:
        load_tier_type("broken")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(PluginError, match=r"'rude' of kvtier-rude 1\.0 .*SystemExit: 3"):
        load_tier_type("rude")


def test_k10_o1_a_target_that_does_not_exist_is_named(install_tier):
    install_tier("fake", target="Teir")
    with pytest.raises(PluginError, match=r"kvtier-fake 1\.0 .*kvtier_fake_module:Teir.*AttributeError"):
        load_tier_type("fake")


def test_k10_o1_broken_metadata_harms_only_its_own_distribution(install_tier, site, caplog):
    install_tier("fake")
    broken = site.path / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_bytes(b"Name: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_bytes(b"[kvtier.tiers.v1]\nfoo = \xff\xfe\n")
    assert load_tier_type("fake").name == "fake"
    assert "broken-1.0.dist-info" in caplog.text


def test_k10_o2_one_name_from_two_distributions_is_an_error_naming_both(install_tier):
    install_tier("disk2", distribution="first-disk")
    install_tier("disk2", distribution="second-disk")
    with pytest.raises(PluginError, match=r"'disk2' is offered by first-disk 1\.0 .* and second-disk 1\.0"):
        load_tier_type("disk2")
    statuses = {item.distribution: status for item, status in list_plugins() if item.name == "disk2"}
    assert statuses == {
        "first-disk": "conflict: also offered by second-disk 1.0",
        "second-disk": "conflict: also offered by first-disk 1.0",
    }


def test_k10_o2_a_conflict_harms_no_other_name(install_tier):
    install_tier("disk2", distribution="first-disk")
    install_tier("disk2", distribution="second-disk")
    install_tier("fake")
    assert load_tier_type("fake").name == "fake"


def test_c50_a_distribution_that_is_on_the_path_twice_is_no_conflict(
    install_tier, site, tmp_path, monkeypatch
):
    install_tier("fake")
    second = tmp_path / "second"
    second.symlink_to(site.path)
    monkeypatch.syspath_prepend(str(second))
    assert load_tier_type("fake").version == "1.0"
    assert _status("fake") == "available"


def test_k10_o3_a_missing_argument_is_refused_at_load(install_tier):
    install_tier("old", source=HOOKS.format(arguments=""))
    with pytest.raises(
        PluginError, match=r"(?s)kvtier-old 1\.0.*submit_store lacks .*'job'.*submit_store\(self, job\)"
    ):
        load_tier_type("old")


def test_c51_a_tier_on_the_hook_specs_is_accepted(install_tier):
    install_tier("hooks", source=HOOKS.format(arguments="job"))
    assert load_tier_type("hooks").name == "hooks"


def test_k10_o3_a_plugin_for_another_major_is_named(install_tier):
    install_tier("old", group="kvtier.tiers.v0")
    with pytest.raises(
        PluginError, match=r"another API major, by kvtier-old 1\.0 \(group kvtier\.tiers\.v0\)"
    ):
        load_tier_type("old")
    assert _status("old").startswith("unusable")


def test_k9_o3_an_unknown_type_names_the_nearest_and_the_installed(install_tier):
    install_tier("fake")
    with pytest.raises(
        PluginError, match=r"unknown tier type 'fakt'; did you mean 'fake'\? \(installed: .*fake"
    ):
        load_tier_type("fakt")


def test_c50_a_type_that_is_ours_but_not_installed_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("kvtier_core.plugins.discovery.distributions", list)
    with pytest.raises(PluginError, match="pip install kvtier-fsspec"):
        load_tier_type("fsspec")


def test_c50_a_target_that_is_no_class_is_refused(install_tier):
    install_tier("fake", source="Tier = 3")
    with pytest.raises(PluginError, match=r"kvtier-fake 1\.0.* 3, not a class"):
        load_tier_type("fake")


COMMAND = """
help = "Say hello."
def add_arguments(parser): parser.add_argument("--name", default="you")
def run(args): print("hello", args.name); return 5
"""


def test_c50_a_command_is_found_and_loaded_by_name(site):
    site.install("greeter", {"kvtier.commands.v1": {"hello": "greeter_module"}}, {"greeter_module": COMMAND})
    assert list_commands()["hello"] == "greeter"
    assert "greeter_module" not in sys.modules
    assert load_command("hello").help == "Say hello."


def test_c50_a_command_that_lacks_a_member_is_refused(site):
    site.install(
        "greeter", {"kvtier.commands.v1": {"hello": "greeter_module"}}, {"greeter_module": "run = 3"}
    )
    with pytest.raises(PluginError, match=r"'hello' of greeter 1\.0 .*lacks help, add_arguments, run"):
        load_command("hello")


def test_c50_two_commands_of_one_name_are_an_error_naming_both(site):
    for name in ("greeter", "welcomer"):
        site.install(name, {"kvtier.commands.v1": {"hello": "greeter_module"}}, {"greeter_module": COMMAND})
    with pytest.raises(PluginError, match=r"greeter 1\.0 .* and welcomer 1\.0"):
        load_command("hello")


def test_c50_plugins_are_loaded_in_a_process_without_torch(install_tier, site):
    install_tier("fake")
    program = "import kvtier_core, sys; kvtier_core.load_tier_type('fake'); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(site.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
