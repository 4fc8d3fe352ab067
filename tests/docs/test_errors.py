"""Every mistake of ``bad_input`` made for real; docs/reference/errors.md is what comes of them.

``UPDATE_DOCS=1 pytest tests/docs`` writes the page anew.
"""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path

import pytest

from kvtier.main import main
from tests.docs.bad_input import DISK, POOL, PROMPT, RUN, SECRET, SECTIONS, Case
from tests.docs.pages import UPDATE, update_or_compare
from tests.transformers.tiny import save_model, tiny_model

PAGE = Path(__file__).parents[2] / "docs/reference/errors.md"
OURS = {"kvtier-disk", "kvtier-fsspec", "kvtier-memory", "kvtier-transformers", "kvtier-valkey"}
CASES = [case for cases in SECTIONS.values() for case in cases]
HEAD = """# What goes wrong, and what kvtier says

Every mistake below is made by a test, which also wrote this page. Status 2 is wrong usage or configuration, 1 a
failure, 0 a warning. No message is a traceback; `kvtier --debug COMMAND` shows one. No message holds a secret.
"""
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""
_rows: dict[str, str] = {}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_model(tiny_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def s3():
    """An S3 server on loopback that holds one bucket."""
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        _send(f"{endpoint}/bucket", "PUT", b"")
        yield endpoint
    finally:
        server.communicate(timeout=30)  # the end of its input is the end of the server


def _send(url, method, body):
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request",
        "Content-Type": "text/plain",
    }
    with urllib.request.urlopen(
        urllib.request.Request(url, body, headers, method=method), timeout=30
    ) as answer:
        assert answer.status == 200


@pytest.fixture(autouse=True)
def workplace(tmp_path, model, monkeypatch):
    """A directory where everything is right, and the distributions of this repository alone."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "model").symlink_to(model)
    (place / "prompts.jsonl").write_text(PROMPT)
    (place / "kvtier.toml").write_text(POOL + DISK)
    monkeypatch.chdir(place)

    def known():
        return [
            item for item in distributions() if item.metadata["Name"] in OURS or _is_below(item, tmp_path)
        ]

    monkeypatch.setattr("kvtier_core.plugins.discovery.distributions", known)
    log = logging.getLogger("kvtier")
    before = (log.handlers[:], log.level)
    yield place
    log.handlers[:], level = before
    log.setLevel(level)


def _is_below(distribution, path):
    return str(getattr(distribution, "_path", "")).startswith(str(path))


def _run(case, capsys, s3_endpoint):
    arguments = shlex.split(case.command)[1:]
    if s3_endpoint is not None:  # in a process of its own: the S3 client keeps threads and connections
        environ = {**os.environ, **case.environ}
        program = [sys.executable, "-m", "kvtier.main", *arguments]
        done = subprocess.run(program, capture_output=True, text=True, check=False, env=environ, timeout=100)
        return done.returncode, done.stdout, done.stderr
    try:
        status = main(arguments)
    except SystemExit as usage:
        status = int(usage.code or 0)
    return status, *capsys.readouterr()


def _message(case, out, err, place):
    if "usage:" in err:
        err = err[err.index(": error:") :].join(["kvtier " + case.command.split()[1], ""])
    text = (out if case.command.startswith("kvtier doctor") else "") + err
    # Of a tier with room for one block, where a busy machine stores two at a time.
    text = "\n".join(line for line in text.splitlines() if "every block in it is in use" not in line)
    text = re.sub(r"\d+\.\d ms", "N ms", text.strip().replace(f"{place}/", ""))
    text = re.sub(r"kvtier-doctor-[0-9a-f]{32}", "kvtier-doctor-...", text)
    text = re.sub(r"\bmodel-[0-9a-f]{32}", "model-...", text)
    text = re.sub(r"\b(kvtier-[a-z]+) \d+\.\d+\.\d+", r"\1 X.Y.Z", text)
    text = re.sub(r"127\.0\.0\.1:\d{2,}", "127.0.0.1:PORT", text)
    text = re.sub(r"leaves \d+\.\d+ [KMGT]iB", "leaves N GiB", text)
    return re.sub(r"does not fit: \S+( \(MemAvailable\))?", "does not fit: FILE", text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_k9_a_mistake_gets_one_message_that_says_what_where_and_what_to_do(
    case: Case, workplace, site, monkeypatch, capsys, request
):
    endpoint = request.getfixturevalue("s3") if case.needs_s3 else None
    if endpoint is not None:  # how many requests it answers before it checks keys
        _send(f"{endpoint}/moto-api/reset-auth", "POST", b"0" if case.checks_keys else b"inf")
    for name, text in case.files.items():
        (workplace / name).parent.mkdir(exist_ok=True)
        (workplace / name).write_text(text.replace("ENDPOINT", endpoint or ""))
    if case.plugins is not None:
        case.plugins(site)
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patched:
        if case.storage is not None:
            case.storage(patched)
        status, out, err = _run(case, capsys, endpoint)
    assert status == case.status, (out, err)
    message = _message(case, out, err, workplace)
    for part in case.says:
        assert part in message
    assert message.count("error: ") == (1 if err and case.status else 0)
    assert "Traceback" not in out + err
    assert SECRET not in out + err
    assert str(workplace.parent) not in message, "the page must not depend on where the test ran"
    _rows[case.title] = _row(case, message)
    if not UPDATE:
        assert _rows[case.title] in PAGE.read_text().splitlines(), "run UPDATE_DOCS=1 pytest tests/docs"


def _row(case, message):
    cells = [
        case.title,
        f"`{_typed(case)}`",
        "<br>".join(f"`{line.strip()}`" for line in message.splitlines()),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, str(case.status))) + " |"


def _typed(case):
    return "".join(f"{name}={value} " for name, value in case.environ.items()) + case.command


def test_the_page_has_exactly_these_mistakes():
    if UPDATE:
        pytest.skip("written by what runs last")
    rows = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| case ")
    ]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [case.title for case in CASES]


@pytest.fixture(scope="module", autouse=True)
def _written_page():
    yield
    if UPDATE and set(_rows) == {case.title for case in CASES}:
        text = HEAD
        for section, cases in SECTIONS.items():
            text += f"\n## {section}\n\n| case | command | message | status |\n|---|---|---|---|\n"
            text += "".join(f"{_rows[case.title]}\n" for case in cases)
        update_or_compare(PAGE, text)


def test_k9_no_mistake_loses_what_is_stored(workplace, capsys):
    def run():
        status = main([*shlex.split(RUN)[1:], "--json"])
        return status, capsys.readouterr().out

    def stored():
        return {
            path.name: sha256(path.read_bytes()).hexdigest() for path in (workplace / "cache").rglob("*.ext")
        }

    right = POOL + DISK + "min_free = 0\n"  # else a machine whose disk fills up would have blocks evicted
    (workplace / "kvtier.toml").write_text(right)
    assert run()[0] == 0
    blocks = stored()
    assert blocks
    for case in CASES:
        if not case.plugins and not case.storage and not case.needs_s3 and "cache" not in case.files:
            for name, text in case.files.items():
                (workplace / name).parent.mkdir(exist_ok=True)
                (workplace / name).write_text(text)
            if "pool too small" not in case.title:
                _run(case, capsys, None)
            assert stored() == blocks, case.title
            (workplace / "kvtier.toml").write_text(right)
            (workplace / "prompts.jsonl").write_text(PROMPT)
    status, out = run()
    assert status == 0
    assert json.loads(out)["hits_by_tier"] == {"disk": 32}
