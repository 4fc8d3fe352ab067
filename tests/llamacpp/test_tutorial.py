"""The tutorial of ``kvtier serve`` works as it stands: its files and commands, in its order, with a restart between."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.tutorial import blocks, files

pytest.importorskip("openai")

pytestmark = pytest.mark.timeout(600)
PAGE = Path(__file__).parents[2] / "docs/tutorial/serve.md"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _commands(port: int) -> dict[str, str]:
    return {
        block.name: block.text.replace("8000", str(port)) for block in blocks(PAGE) if block.language == "sh"
    }


def test_every_block_is_marked_and_used():
    assert [block.name for block in blocks(PAGE) if block.name] == [
        "install",
        "install-model",
        "model",
        "kvtier.toml",
        "serve",
        "ask.py",
        "ask",
    ]


def test_the_tutorials_server_restores_its_prompt_after_a_restart(tmp_path):
    for name, text in files(PAGE).items():
        (tmp_path / name).write_text(text.replace("1GiB", "64MiB"))
    commands = _commands(_free_port())
    bin_directory = tmp_path / "bin"
    bin_directory.mkdir()
    program = bin_directory / "kvtier"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvtier.main "$@"\n')
    program.chmod(0o755)
    (bin_directory / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}"}
    # A link to an interpreter outside its environment finds no packages there.
    environment["PYTHONPATH"] = ":".join(filter(None, sys.path))
    _type(commands["model"], tmp_path, environment)
    said = []
    for _ in range(2):
        server = subprocess.Popen(
            shlex.split(commands["serve"]),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout.readline().startswith("serving MODEL at http://127.0.0.1:")
            said.append(_type(commands["ask"], tmp_path, environment))
        finally:
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=300)
        assert server.returncode == 0, errors
    first, second = (
        [int(count) for count in re.findall(r"(\d+) of (\d+) prompt tokens were restored", text)[0]]
        for text in said
    )
    assert first == [0, second[1]]
    assert second[0] > second[1] - 17
    assert said[0].splitlines()[0] == said[1].splitlines()[0]


def _type(command: str, place: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euc", command], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
