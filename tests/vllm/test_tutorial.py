"""The tutorial as it stands, but for the installation: a model directory, vLLM's server, its client, a restart."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.tutorial import blocks, script
from tests.transformers.tiny import byte_tokenizer
from tests.vllm.engines import QUIET, needs_vllm
from tests.vllm.models import save_tiny_model

PAGE = Path(__file__).parents[2] / "docs/tutorial/vllm.md"
TIMEOUT_S = 2400.0
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "
)

pytestmark = [pytest.mark.timeout(2 * TIMEOUT_S)]


def test_every_block_is_marked():
    names = [block.name for block in blocks(PAGE)]
    assert names == [
        "install-cpu",
        "install",
        "model.py",
        "install-model",
        "model",
        "kvtier.toml",
        "serve.sh",
        "wait.sh",
        "ask.py",
        "first",
        "second",
        "doctor",
    ]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def type_in(directory, *names, **variables):
    """Do what the page says in *directory*, of its commands those called *names*."""
    return subprocess.run(
        ["bash", "-c", "set -m\n" + script(*names, page=PAGE)],
        cwd=directory,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_what_to_do_when_it_does_not_start_works_without_vllm(tmp_path):
    done = type_in(tmp_path, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tier 'disk' (type 'disk' of kvtier-disk" in done.stdout


def test_every_command_of_kvtiers_own_is_in_a_block_that_is_run():
    prose = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    assert re.findall(r"`kvtier [^`]*`", prose) == []


def quiet(**variables):
    """Variables for the page's own commands, which say themselves how much memory vLLM takes."""
    own = {name: value for name, value in QUIET.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    return own | {"VLLM_LOGGING_LEVEL": "INFO", "PORT": str(free_port())} | variables


def save_chat_model(directory):
    """A random model with a tokenizer and a template for chats."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return save_tiny_model(directory, vocab_size=len(tokenizer))


@needs_vllm
@pytest.mark.real_model
def test_v10_one_command_makes_a_directory_that_vllm_serves(tmp_path):
    done = type_in(tmp_path, "model", "first", **quiet(LENGTH="1024", CHARACTERS="600"))
    logs = "".join(file.read_text()[-3000:] for file in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert (tmp_path / "model" / "config.json").is_file()
    assert len(re.findall(r"answer: '.*[a-z]", done.stdout)) == 2, done.stdout


@needs_vllm
def test_v5_a_server_that_does_not_start_is_not_waited_for_and_its_reason_is_shown(tmp_path):
    model = save_chat_model(tmp_path / "MODEL")
    done = type_in(
        tmp_path, "first", **quiet(MODEL=str(model), LENGTH="512", KVTIER_POOL__CAPACITY="1000TiB")
    )
    assert done.returncode != 0
    said = done.stdout.splitlines()
    (head,) = [number for number, line in enumerate(said) if "vLLM did not start" in line]
    assert "does not fit" in said[head + 1], done.stdout


@needs_vllm
def test_v5_k7_o1_two_chats_share_a_system_prompt_over_a_restart(tmp_path):
    model = save_chat_model(tmp_path / "MODEL")
    done = type_in(
        tmp_path,
        "first",
        "second",
        **quiet(MODEL=str(model), LENGTH="1024", CHARACTERS="640"),
    )
    logs = "".join(file.read_text()[-3000:] for file in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    cached = [int(number) for number in re.findall(r"(\d+) of them cached", done.stdout)]
    assert cached[0] == 0, done.stdout
    assert min(cached[1:]) >= 512, done.stdout
    answers = re.findall("answer: (.*)", done.stdout)
    assert answers[0] == answers[2] != "''"
    hits = re.search(r'vllm:kvtier_hit_blocks_total\{.*source="disk"\} (\d+)', done.stdout)
    assert hits is not None, done.stdout
    assert int(hits[1]) >= 4
    assert "_created" not in done.stdout  # V9
