"""``kvtier serve`` with a real llama.cpp, asked by OpenAI's client, with restarts between."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.llamacpp.tiny_gguf import write_jamba

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.timeout(600)
MANUAL = "The manual says: fill the tank with cold water, close the lid, press the red button twice. " * 6
MESSAGES = [{"role": "system", "content": MANUAL}, {"role": "user", "content": "What do I press?"}]


@contextmanager
def serving(
    model: Path, config: Path, *, end: bool = True, status: int = 0
) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """A server in a process of its own, and a client for it. SIGTERM ends it, at the end of the block if not before."""
    command = ("serve", "--engine", "llama.cpp", "--model", model, "--config", config, "--port", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier.main", *command, "--context", "512"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = process.stdout.readline()
        assert said.startswith(f"serving {model.stem} at http://127.0.0.1:"), process.communicate(timeout=60)
        with openai.OpenAI(base_url=said.split()[-1], api_key="none", timeout=300, max_retries=0) as client:
            yield client, process
    finally:
        if end:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == status, errors
    assert "Traceback" not in errors


def _chat(client: Any, model: Path, **more: object) -> Any:
    return client.chat.completions.create(
        model=model.stem, messages=MESSAGES, max_completion_tokens=12, **more
    )


def test_a_restarted_server_restores_the_prompt_and_gives_the_same_answer(model, config):
    with serving(model, config) as (client, _):
        assert [entry.id for entry in client.models.list()] == [model.stem]
        first = _chat(client, model)
        assert first.usage.prompt_tokens_details.cached_tokens == 0
    with serving(model, config) as (client, _):
        again = _chat(client, model)
        cached = again.usage.prompt_tokens_details.cached_tokens
        assert again.usage.prompt_tokens - 17 < cached < again.usage.prompt_tokens
        assert again.choices[0].message.content == first.choices[0].message.content
        chunks = list(_chat(client, model, stream=True, stream_options={"include_usage": True}))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed == first.choices[0].message.content
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == cached
        text = client.completions.create(model=model.stem, prompt=MANUAL, max_tokens=4)
        assert text.usage.completion_tokens == 4
        drawn = [_chat(client, model, temperature=1.5, seed=seed) for seed in (3, 3, 4)]
        texts = [one.choices[0].message.content for one in drawn]
        assert texts[0] == texts[1] != texts[2]
        with pytest.raises(openai.BadRequestError, match="presence_penalty=0.5 can't be served"):
            _chat(client, model, presence_penalty=0.5)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def test_a_restarted_server_goes_on_from_the_state_of_a_model_that_keeps_one(config, tmp_path):
    model = write_jamba(tmp_path / "jamba.gguf", has_text=True)
    answers = []
    for _ in range(2):
        with serving(model, config) as (client, _):
            answers.append(client.completions.create(model="jamba", prompt=MANUAL[:300], max_tokens=8))
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 288]
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_a_server_that_is_ended_in_the_middle_gives_the_answer_and_keeps_it(model, config):
    with serving(model, config, end=False) as (client, process):
        try:
            stream = _chat(client, model, stream=True)
            next(stream)
        finally:
            process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason in {"length", "stop"}
    with serving(model, config) as (client, _):
        again = _chat(client, model)
        assert again.usage.prompt_tokens_details.cached_tokens > again.usage.prompt_tokens - 17


def test_a_second_ctrl_c_ends_the_server_at_once_and_without_a_traceback(model, config):
    with serving(model, config, end=False, status=-signal.SIGINT) as (client, process):
        stream = client.completions.create(model=model.stem, prompt=MANUAL, max_tokens=300, stream=True)
        next(stream)
        process.send_signal(signal.SIGINT)
        for _ in range(5):  # until the server has seen it
            next(stream)
        process.send_signal(signal.SIGINT)
        process.wait(60)
