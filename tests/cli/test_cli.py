import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier_core
from kvtier import main as cli
from kvtier.main import main

COMMAND = """
import sys
from kvtier_core import ConfigError, KvtierError, TierOpenError, UnsupportedModelError
help = "Do as told."
ERRORS = {
    "config": ConfigError("bad setting"),
    "model": UnsupportedModelError("bad model"),
    "open": TierOpenError("bad disk"),
    "interrupt": KeyboardInterrupt(),
    "pipe": BrokenPipeError(),
    "bug": ZeroDivisionError("a bug"),
}
def add_arguments(parser):
    parser.add_argument("how")
    parser.add_argument("--json", action="store_true")
def run(args):
    if args.how in ERRORS:
        raise ERRORS[args.how]
    print(f"how={args.how} json={args.json} debug={args.debug}")
    return int(args.how)
"""


@pytest.fixture
def obey(site):
    site.install(
        "obedient", {"kvtier.commands.v1": {"obey": "obedient_module"}}, {"obedient_module": COMMAND}
    )


@pytest.fixture
def config(install_tier, tmp_path):
    install_tier("fake")
    file = tmp_path / "kvtier.toml"
    file.write_text(
        "[pool]\ncapacity = '2GiB'\n[tiers.cold]\ntype = 'fake'\nroot = '/cold'\npassword = 'hunter2'\n"
    )
    return file


@pytest.mark.parametrize(("arguments", "status"), [(["obey", "0"], 0), (["obey", "7"], 7)])
@pytest.mark.usefixtures("obey")
def test_a_plugins_command_decides_the_exit_status(arguments, status, capsys):
    assert main(arguments) == status
    assert capsys.readouterr().out == f"how={status} json=False debug=False\n"


@pytest.mark.usefixtures("obey")
def test_options_after_the_command_are_the_commands(capsys):
    assert main(["--debug", "obey", "0", "--json"]) == 0
    assert capsys.readouterr().out == "how=0 json=True debug=True\n"


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("config", 2, "kvtier: error: bad setting\n"),
        ("model", 2, "kvtier: error: bad model\n"),
        ("open", 1, "kvtier: error: bad disk\n"),
        ("interrupt", 130, "kvtier: interrupted\n"),
    ],
)
@pytest.mark.usefixtures("obey")
def test_an_error_is_one_message_and_a_status(how, status, message, capsys):
    assert main(["obey", how]) == status
    assert capsys.readouterr() == ("", message)


@pytest.mark.usefixtures("obey")
def test_debug_shows_the_traceback():
    with pytest.raises(kvtier_core.ConfigError, match="bad setting"):
        main(["--debug", "obey", "config"])


@pytest.mark.usefixtures("obey")
def test_a_bug_is_not_made_to_look_like_a_users_mistake():
    with pytest.raises(ZeroDivisionError):
        main(["obey", "bug"])


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("bench", "kvtier-testing"),
        ("check", "kvtier-testing"),
        ("demo", "kvtier-transformers"),
    ],
)
def test_without_our_plugin_its_commands_say_how_to_get_it(name, distribution, capsys, monkeypatch):
    monkeypatch.setattr("kvtier.commands.find_offers", lambda _prefix, _blocked: [])
    assert main([name]) == 2
    assert (
        capsys.readouterr().err
        == f"kvtier: error: command {name!r} is not installed: pip install {distribution}\n"
    )


@pytest.mark.parametrize("command", [["run", "--prompts", "p.jsonl"], ["serve"]])
@pytest.mark.parametrize(
    ("engine", "package"), [("llama.cpp", "kvtier-llamacpp"), ("transformers", "kvtier-transformers")]
)
def test_without_an_engines_package_its_commands_say_how_to_get_it(
    command, engine, package, capsys, monkeypatch
):
    monkeypatch.setattr("kvtier.engines.find_offers", lambda _prefix, _blocked: [])
    assert main([*command, "--model", "m", "--engine", engine]) == 2
    assert (
        capsys.readouterr().err
        == f"kvtier: error: engine {engine!r} is not installed: pip install {package}\n"
    )


def test_serve_says_which_library_is_missing(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "kvtier.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["serve", "--model", "m"]) == 2
    assert (
        capsys.readouterr().err == "kvtier: error: kvtier serve needs aiohttp: pip install 'kvtier[serve]'\n"
    )


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["lst"]) == 2
    assert "unknown command 'lst'; did you mean 'list'?" in capsys.readouterr().err


def test_no_command_is_a_usage_error_with_help(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "config" in err


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["list", "--nonsense"], ["config", "--config"], ["list", "--js"]]
)
def test_wrong_usage_exits_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.usefixtures("obey")
def test_help_lists_plugin_commands_without_importing_them(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "obey" in out
    assert "(from obedient)" in out
    assert "obedient_module" not in sys.modules


@pytest.mark.parametrize("name", [*cli.OWN_COMMANDS])
def test_own_commands_have_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"usage: kvtier {name}" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvtier {kvtier_core.__version__}\n"


def test_c50_list_shows_name_distribution_version_api_and_status(install_tier, capsys):
    install_tier("fake")
    assert main(["list"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fake "))
    assert row.split() == ["fake", "kvtier-fake", "1.0", "kvtier.tiers.v1", "available"]
    assert main(["list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {
        "name": "fake",
        "distribution": "kvtier-fake",
        "version": "1.0",
        "group": "kvtier.tiers.v1",
        "status": "available",
    } in entries


def test_i21_list_load_tries_each_and_says_why_one_cannot_be_used(install_tier, capsys):
    install_tier("fake")
    install_tier("torn", source="import nothing_of_that_name")
    install_tier("odd", source="Tier = int")
    assert main(["list", "--load", "--json"]) == 1
    listed = {entry["name"]: entry["status"] for entry in json.loads(capsys.readouterr().out)}
    assert listed["fake"] == "loaded"
    assert "No module named 'nothing_of_that_name'" in listed["torn"]
    assert "is not a tier type of kvtier.tiers.v1" in listed["odd"]
    assert main(["list", "--json"]) == 0


def test_c50_list_survives_a_conflict(install_tier, capsys):
    install_tier("disk2", distribution="first-disk")
    install_tier("disk2", distribution="second-disk")
    assert main(["list"]) == 0
    assert "conflict: also offered by first-disk 1.0" in capsys.readouterr().out


def test_c53_config_shows_every_value_with_its_source_and_no_secret(config, capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_POOL__BLOCK_SIZE", "32")
    monkeypatch.setenv("KVTIER_SERVICE_HOST", "10.0.0.1")
    assert main(["config", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert lines["pool.capacity"] == ['"2GiB"', f"file:{config}"]
    assert lines["pool.block_size"] == ["32", "env:KVTIER_POOL__BLOCK_SIZE"]
    assert lines["pool.policy"] == ['"lru"', "default"]
    assert lines["tiers.cold.password"] == ['"**********"', f"file:{config}"]
    assert "ignored (put there by Kubernetes): KVTIER_SERVICE_HOST" in out
    assert "hunter2" not in out


def test_c53_config_as_json(config, capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_CONFIG", str(config))
    assert main(["config", "--json"]) == 0
    out = capsys.readouterr().out
    shown = json.loads(out)
    assert shown["file"] == str(config)
    values = {item["name"]: item["value"] for item in shown["values"]}
    assert values["pool.capacity"] == 2 << 30
    assert "hunter2" not in out


def test_c53_config_check_prints_nothing_but_problems(config, capsys):
    assert main(["config", "--config", str(config), "--check"]) == 0
    assert capsys.readouterr() == ("", "")
    config.write_text("[pool]\ncapcity = 1\n")
    assert main(["config", "--config", str(config), "--check"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvtier: error: pool.capcity")


def test_c53_kvtier_log_sets_the_level(monkeypatch, capsys):
    monkeypatch.setenv("KVTIER_LOG", "info")
    assert main(["config", "--check"]) == 0
    assert logging.getLogger("kvtier").level == logging.INFO
    monkeypatch.setenv("KVTIER_LOG", "loud")
    assert main(["config", "--check"]) == 2
    assert "KVTIER_LOG: must be one of debug, info, warning, error" in capsys.readouterr().err


def _start(*arguments, site_path="", **options):
    environ = {**os.environ, "PYTHONPATH": str(site_path)}
    return subprocess.run(
        [sys.executable, "-m", "kvtier.main", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )


def test_the_own_commands_start_without_torch():
    program = (
        "import sys; from kvtier.main import main; main(['list']); main(['config']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0


def test_a_real_process_exits_with_the_status_and_without_a_traceback(obey, site, tmp_path):
    done = _start("obey", "open", site_path=site.path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "kvtier: error: bad disk\n")
    done = _start("--debug", "obey", "open", site_path=site.path, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvtier.main", "list"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_output_that_has_no_room_is_one_message(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvtier.main", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "kvtier: error: [Errno 28] No space left on device: see that what it reads can be read and what it "
        "writes to, the output too, can be written (kvtier --debug COMMAND shows where)\n"
    )


def test_an_output_that_was_closed_costs_the_output_alone(tmp_path):
    command = f"exec {sys.executable} -m kvtier.main new-tier tape >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "kvtier-tape" / "pyproject.toml").exists()
