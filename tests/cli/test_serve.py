"""The server of ``kvtier serve`` over HTTP, with an engine that answers what it is told, byte by byte."""

import asyncio
import http.client
import json
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kvtier_core import PoolError
from kvtier_core.engine import Generation

server_module = pytest.importorskip("kvtier.serve.server", reason="aiohttp is not installed")

CONTEXT = 100


class Model:
    """A token is a byte. A conversation is its contents, joined."""

    context_tokens = CONTEXT

    def tokenize(self, text):
        return list(text.encode())

    def tokenize_chat(self, messages):
        return self.tokenize("|".join(message["content"] for message in messages))

    def detokenize(self, token_ids):
        return bytes(token_ids).decode(errors="replace")


class Engine:
    """Answers ``answer``. Between tokens it runs ``between``."""

    def __init__(self):
        self.answer = b"the green light"
        self.between: Callable[[int], None] = lambda _: None
        self.asked: list[dict[str, Any]] = []
        self.ended_early = queue.Queue[int]()

    def generate(self, prompt_ids, *, max_tokens, salt=None, on_token=None, choose=None):
        assert choose is None
        self.asked.append({"prompt": bytes(prompt_ids).decode(), "max_tokens": max_tokens, "salt": salt})
        token_ids: list[int] = []
        for token in self.answer[:max_tokens]:
            self.between(len(token_ids))
            token_ids.append(token)
            if on_token(token) is True:
                self.ended_early.put(len(token_ids))
                break
        return Generation(
            token_ids=tuple(token_ids),
            finish_reason="length" if len(token_ids) == max_tokens < len(self.answer) else "stop",
            prompt_tokens=len(prompt_ids),
            hit_tokens=16,
            hits_by_tier={"disk": 16},
            misses=(),
            ttft_s=0.1,
            load_s=0.0,
            seconds=0.2,
            first_logits=None,
        )


class Served:
    """A running server."""

    def __init__(self, engine: Engine, port: int, end: Callable[[], None]) -> None:
        self.engine, self.port, self.end = engine, port, end

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, path: str, body: object = None, method: str | None = None) -> tuple[int, Any]:
        """Status and JSON of one request."""
        with closing(self.connect()) as connection:
            data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            connection.request(method or ("GET" if body is None else "POST"), path, data)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def stream(self, path: str, body: dict[str, object]) -> list[Any]:
        """The events of a streamed answer."""
        with closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
            events = [line.removeprefix(b"data: ") for line in answer.read().splitlines() if line]
            return [event.decode() if event == b"[DONE]" else json.loads(event) for event in events]


@contextmanager
def serving(engine: Engine) -> Iterator[Served]:
    """A server in a thread, until the block ends."""
    model: Any = Model()
    engine_: Any = engine
    opened: queue.Queue[Any] = queue.Queue()

    async def main() -> None:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        with closing(server_module.Server(model, engine_, name="tiny", max_tokens=CONTEXT)) as server:
            await server_module.run_until(
                ended,
                server.app,
                "127.0.0.1",
                0,
                lambda address: opened.put((address, lambda: loop.call_soon_threadsafe(ended.set))),
            )

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    address, end = opened.get(timeout=60)
    try:
        yield Served(engine, int(address.removesuffix("/v1").rpartition(":")[2]), end)
    finally:
        end()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(Engine()) as found:
        yield found


def test_a_text_is_completed(served):
    status, answer = served.ask("/v1/completions", {"prompt": "wait until", "max_tokens": 9, "model": "tiny"})
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "the green", "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 9,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert served.engine.asked == [{"prompt": "wait until", "max_tokens": 9, "salt": None}]


def test_a_conversation_is_answered_up_to_the_context_if_nothing_else_is_said(served):
    parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": "wait?"}]
    status, answer = served.ask("/v1/chat/completions", {"messages": messages, "cache_salt": "a"})
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "the green light"
    assert choice["finish_reason"] == "stop"
    assert served.engine.asked == [{"prompt": "be brief|wait?", "max_tokens": CONTEXT - 14, "salt": "a"}]


def test_a_streamed_text_comes_in_pieces_with_the_usage_at_the_end(served):
    body = {"prompt": "x", "stream_options": {"include_usage": True}}
    *pieces, end, used, done = served.stream("/v1/completions", body)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "the green light"
    assert len(pieces) > 1
    assert end["choices"][0]["finish_reason"] == "stop"
    assert used["choices"] == []
    assert used["usage"]["total_tokens"] == 16
    assert done == "[DONE]"


def test_a_streamed_conversation_begins_with_the_role(served):
    first, *pieces, _end, _done = served.stream(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == "the green light"


def test_a_stop_text_ends_the_answer_before_it_wherever_tokens_are_cut(served):
    status, answer = served.ask("/v1/completions", {"prompt": "x", "stop": ["en l", "zzz"]})
    assert status == 200
    assert answer["choices"][0]["text"] == "the gre"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert served.engine.ended_early.get_nowait() == len("the green l")
    *pieces, _end, _done = served.stream("/v1/completions", {"prompt": "x", "stop": "en l"})
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "the gre"


def test_a_character_of_several_tokens_is_sent_whole(served):
    served.engine.answer = "aé€".encode()
    *pieces, _end, _done = served.stream("/v1/completions", {"prompt": "x"})
    assert [piece["choices"][0]["text"] for piece in pieces] == ["a", "é", "€"]
    served.engine.answer = "€".encode()[:2]  # and one that never ends is sent as what it is
    *pieces, _end, _done = served.stream("/v1/completions", {"prompt": "x"})
    assert [piece["choices"][0]["text"] for piece in pieces] == ["\ufffd"]


def test_the_model_is_listed(served):
    status, listed = served.ask("/v1/models")
    assert (status, [entry["id"] for entry in listed["data"]]) == (200, ["tiny"])
    assert served.ask("/v1/models/tiny") == (200, listed["data"][0])
    assert served.ask("/health") == (200, {"status": "ok", "waiting": 0})


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "message"),
    [
        ("/v1/models/other", None, 404, "model_not_found", "only the model 'tiny'"),
        ("/v1/embeddings", {}, 404, None, "POST /v1/embeddings: Not Found"),
        ("/v1/completions", None, 405, None, "Method Not Allowed"),
        ("/v1/completions", b"{", 400, None, "the body is not JSON"),
        ("/v1/completions", b"[" * 100_000, 400, None, "the body is not JSON"),
        ("/v1/completions", b'"' + b"x" * (5 << 20) + b'"', 413, None, "larger than 4 MiB"),
        (
            "/v1/completions",
            {"prompt": "x", "frequency_penalty": 0.7},
            400,
            None,
            "frequency_penalty=0.7 can't be served",
        ),
        (
            "/v1/completions",
            {"prompt": "x" * 90, "max_tokens": 11},
            400,
            "context_length_exceeded",
            "90 prompt tokens and 11 more exceed this server's context of 100",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 4000}] * 2},
            400,
            "context_length_exceeded",
            "8000 characters are more than this server's context of 100 tokens holds",
        ),
    ],
)
def test_what_is_refused_is_told_in_the_clients_own_form(served, path, body, status, code, message):
    found, answer = served.ask(path, body)
    assert found == status
    error = answer["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert message in error["message"]
    assert served.engine.asked == []


def test_a_failing_engine_is_told_and_the_next_request_is_served(served, caplog):
    def fail(_: int) -> None:
        raise PoolError("no room")

    served.engine.between = fail
    status, answer = served.ask("/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["message"]) == (500, "no room")
    (error,) = served.stream("/v1/completions", {"prompt": "x"})
    assert error["error"] == {"message": "no room", "type": "server_error", "param": None, "code": None}

    def break_down(_: int) -> None:
        raise ZeroDivisionError("a secret")

    served.engine.between = break_down
    status, answer = served.ask("/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["message"]) == (500, "the server failed: its log says why")
    assert "a secret" in caplog.text
    (error,) = served.stream("/v1/completions", {"prompt": "x"})
    assert error["error"]["message"] == "the server failed: its log says why"
    served.engine.between = lambda _: None
    assert served.ask("/v1/completions", {"prompt": "x"})[0] == 200


@pytest.mark.parametrize(
    "said",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000,
    ],
)
def test_a_client_that_speaks_no_http_is_told_of_in_one_line(served, caplog, said):
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(said + b"\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.0 400 ")
    (record,) = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert record.exc_info is None
    assert record.levelname == "WARNING"
    assert re.match(r"(127\.0\.0\.1|somebody) sent what is no HTTP request: \S", record.getMessage())
    assert "\n" not in record.getMessage()
    assert served.ask("/health")[0] == 200


class Gate:
    """Holds an engine at its second token."""

    def __init__(self, engine: Engine) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        engine.between = self._wait

    def _wait(self, count: int) -> None:
        if count == 1:
            self.reached.set()
            assert self.opened.wait(60)


def test_no_more_wait_than_there_are_places_for(served, monkeypatch):
    monkeypatch.setattr(server_module, "MOST_WAITING", 1)
    gate = Gate(served.engine)
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(served.ask("/v1/completions", {"prompt": "x"})))
    first.start()
    assert gate.reached.wait(60)
    status, answer = served.ask("/v1/completions", {"prompt": "y"})
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (503, "overloaded", "server_error")
    gate.opened.set()
    first.join(60)
    assert found[0][0] == 200
    assert served.ask("/v1/completions", {"prompt": "z"})[0] == 200


def test_a_client_that_never_sends_its_request_loses_its_place(served, monkeypatch):
    monkeypatch.setattr(server_module, "_BODY_S", 0.05)
    with closing(served.connect()) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "10")
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 408
        assert "did not come within" in json.loads(answer.read())["error"]["message"]
    assert served.ask("/health") == (200, {"status": "ok", "waiting": 0})


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_its_client_no_longer_wants_ends(served, is_streamed):
    gate = Gate(served.engine)
    with closing(served.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "stream": is_streamed}))
        assert gate.reached.wait(60)
    while served.ask("/health")[1]["waiting"]:  # until the server has seen it
        pass
    gate.opened.set()
    assert served.engine.ended_early.get(timeout=60) < len(served.engine.answer)
    served.engine.between = lambda _: None
    assert served.ask("/v1/completions", {"prompt": "y"})[0] == 200


def test_clients_that_reset_their_connection_leave_nothing_in_the_log(served, caplog):
    served.engine.answer, served.engine.between = b"x" * 50, lambda _: time.sleep(0.0002)
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    said = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    for number in range(40):
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
            client.sendall(said)
            client.recv(300)
            time.sleep(number * 0.0002)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    while served.ask("/health")[1]["waiting"]:
        pass
    assert [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"] == []


def test_a_server_that_is_to_end_gives_the_answer_under_way_first():
    engine = Engine()
    gate = Gate(engine)
    found: list[Any] = []
    with serving(engine) as served:
        asking = threading.Thread(target=lambda: found.append(served.ask("/v1/completions", {"prompt": "x"})))
        asking.start()
        assert gate.reached.wait(60)
        served.end()
        gate.opened.set()
    asking.join(60)
    status, answer = found[0]
    assert (status, answer["choices"][0]["text"]) == (200, "the green light")


def test_an_answer_that_takes_too_long_ends_with_the_server(monkeypatch):
    monkeypatch.setattr(server_module, "_PATIENCE_S", 0.01)
    engine = Engine()
    gate = Gate(engine)
    with serving(engine) as served, closing(served.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "x"}))
        assert gate.reached.wait(60)
        served.end()
        threading.Timer(1.0, gate.opened.set).start()
    assert engine.ended_early.get(timeout=60) < len(engine.answer)
