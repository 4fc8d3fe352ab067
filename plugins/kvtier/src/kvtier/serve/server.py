"""The server: its addresses, the queue before the engine, and the engine's thread.

Decides who waits and who is sent away. The event loop's thread reads and writes; one thread runs the engine; a few turn
texts into tokens.
"""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from kvtier.engines import Engine, Model
from kvtier.serve.answers import AnswerText, Form
from kvtier.serve.asked import Asked, RefusedError, read_chat, read_completion
from kvtier.serve.sampling import Sampler
from kvtier_core import KvtierError
from kvtier_core.engine import Generation

MOST_BODY_BYTES = 4 << 20
"""About a million tokens of text. Every waiting request may hold as much."""
MOST_CHARACTERS_PER_TOKEN = 64
"""Of a prompt as a whole. A longer one is refused unread: its tokens would take seconds, in which nobody is served."""
MOST_WAITING = 64
"""Requests. On one machine the last of them waits minutes; more would only wait longer than their clients do."""
_PATIENCE_S = 30.0
"""How long answers under way may go on when the server is to end."""
_BODY_S = 60.0
"""How long a client may take to send its request, which has a place meanwhile."""
_log = logging.getLogger("kvtier.serve")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Reader = Callable[[object, str], Asked]


class Server:
    """Answers requests with one engine. Used on the event loop's thread, but for ``_generate``."""

    def __init__(self, model: Model, engine: Engine, *, name: str, max_tokens: int) -> None:
        """*max_tokens* are those of a prompt with its answer, for which the engine was opened."""
        self._model = model
        self._engine = engine
        self._name = name
        self._max_tokens = max_tokens
        self._engine_thread = ThreadPoolExecutor(1, "kvtier-serve-engine")
        self._waiting = 0
        self.app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[_errors_as_openai])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name}", self._one_model),
                web.post("/v1/completions", partial(self._complete, read_completion)),
                web.post("/v1/chat/completions", partial(self._complete, read_chat)),
            ]
        )

    def close(self) -> None:
        """Wait for the engine's thread."""
        self._engine_thread.shutdown()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "waiting": self._waiting})

    def _entry(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": 0, "owned_by": "kvtier"}

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._entry()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != self._name:
            raise RefusedError(
                f"there is only the model {self._name!r}", status=404, code="model_not_found", param="model"
            )
        return web.json_response(self._entry())

    async def _complete(self, read: Reader, request: web.Request) -> web.StreamResponse:
        with self._place():
            asked = read(_parse(await _body(request)), self._name)
            token_ids, max_tokens = await asyncio.to_thread(self._prepare, asked)
            form = Form(self._name, is_chat=asked.is_chat)
            answer = _Answer(self._engine_thread, partial(self._generate, asked, token_ids, max_tokens))
            async with aclosing(answer.pieces()) as pieces:
                if asked.is_streamed:
                    events = _events(request, form, answer, pieces, with_usage=asked.wants_usage)
                    return await _stream(request, events)
                text = "".join([piece async for piece in pieces])
                return web.json_response(form.whole(text, answer.generation))

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._waiting >= MOST_WAITING:
            raise RefusedError(
                f"{self._waiting} requests are waiting already: try again later",
                status=503,
                code="overloaded",
            )
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _prepare(self, asked: Asked) -> tuple[list[int], int]:
        """The tokens of the prompt and how many to add. Raises ``RefusedError`` when they don't fit."""
        if asked.characters > MOST_CHARACTERS_PER_TOKEN * self._max_tokens:
            raise RefusedError(
                f"{asked.characters} characters are more than this server's context of {self._max_tokens} tokens "
                "holds: shorten the prompt, or start the server with a larger --context",
                param="messages" if asked.is_chat else "prompt",
                code="context_length_exceeded",
            )
        try:
            token_ids = (
                self._model.tokenize(asked.prompt)
                if isinstance(asked.prompt, str)
                else self._model.tokenize_chat(asked.prompt)
            )
        except KvtierError as error:
            raise RefusedError(str(error), param="messages" if asked.is_chat else "prompt") from error
        room = self._max_tokens - len(token_ids)
        max_tokens = asked.max_tokens or max(room, 1)
        if not token_ids:
            raise RefusedError("the prompt has no tokens", param="prompt")
        if max_tokens > room:
            raise RefusedError(
                f"{len(token_ids)} prompt tokens and {max_tokens} more exceed this server's context of "
                f"{self._max_tokens}: shorten the prompt, lower max_tokens, or start the server with a larger "
                "--context",
                param="messages" if asked.is_chat else "prompt",
                code="context_length_exceeded",
            )
        return token_ids, max_tokens

    def _generate(
        self,
        asked: Asked,
        token_ids: list[int],
        max_tokens: int,
        send: Callable[[str], None],
        is_unwanted: Callable[[], bool],
    ) -> Generation[Any]:
        """On the engine's thread: the answer, piece by piece to *send*, until nobody wants it."""
        text = AnswerText(asked.stops)
        answer: list[int] = []
        choose = Sampler(asked.temperature, asked.top_p, asked.seed) if asked.temperature else None

        def on_token(token_id: int) -> bool:
            answer.append(token_id)
            send(text.grow(self._model.detokenize(answer)))
            return text.is_stopped or is_unwanted()

        generation = self._engine.generate(
            token_ids, max_tokens=max_tokens, salt=asked.salt, on_token=on_token, choose=choose
        )
        send(text.grow(self._model.detokenize(answer), is_last=True))
        return generation


class _Answer:
    """One answer on its way from the engine's thread to the event loop."""

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        generate: Callable[[Callable[[str], None], Callable[[], bool]], Generation[Any]],
    ) -> None:
        self._thread = thread
        self._generate = generate
        self.generation: Generation[Any]
        """There when all pieces have come."""

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The text, as it comes. Raises ``KvtierError`` as the engine does. If it is closed, the engine stops."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[str | None] = asyncio.Queue()  # no longer than the answer
        unwanted = threading.Event()

        def send(piece: str) -> None:
            if piece and not unwanted.is_set():  # afterwards the loop may be closed
                loop.call_soon_threadsafe(waiting.put_nowait, piece)

        running = loop.run_in_executor(self._thread, self._generate, send, unwanted.is_set)
        running.add_done_callback(lambda _: waiting.put_nowait(None))
        try:
            while (piece := await waiting.get()) is not None:
                yield piece
            self.generation = await running
        finally:
            unwanted.set()
            running.cancel()


async def _stream(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Send *events* as long as somebody takes them."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        await response.prepare(request)
        async with aclosing(events):
            async for event in events:
                await response.write(event)
    except ConnectionError as error:
        _log.debug("%s %s: the client went away: %s", request.method, request.path, error)
    return response


async def _events(
    request: web.Request, form: Form, answer: _Answer, pieces: AsyncIterator[str], *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. A failure is the last of them."""
    for chunk in form.begin():
        yield _event(chunk)
    try:
        async for piece in pieces:
            yield _event(form.chunk(piece))
    except Exception as error:  # noqa: BLE001 - too late for a status, whatever it is
        yield _event(_refusal(request, error).as_json())
        return
    for chunk in form.end(answer.generation, with_usage=with_usage):
        yield _event(chunk)
    yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except TimeoutError:
        raise RefusedError(f"the body did not come within {_BODY_S:g} s", status=408) from None


def _parse(data: bytes) -> object:
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from error
    return value


@web.middleware
async def _errors_as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error the form that OpenAI's clients know."""
    try:
        return await handler(request)
    except Exception as error:  # noqa: BLE001 - a client must not see what it was
        refused = _refusal(request, error)
        return web.json_response(refused.as_json(), status=refused.status)


def _refusal(request: web.Request, error: Exception) -> RefusedError:
    """What a client is told of *error*. The log says the rest."""
    where = f"{request.method} {request.path}"
    match error:
        case RefusedError():
            return error
        case web.HTTPRequestEntityTooLarge():
            return RefusedError(
                f"{where}: the body is larger than {MOST_BODY_BYTES >> 20} MiB: shorten it", status=413
            )
        case web.HTTPException():  # no such address, another method
            return RefusedError(f"{where}: {error.reason}", status=error.status)
        case KvtierError():
            _log.warning("%s failed: %s", where, error)
            return RefusedError(str(error), status=500)
        case _:
            _log.error("%s failed", where, exc_info=error)
            return RefusedError("the server failed: its log says why", status=500)


def _tell_in_one_line(record: logging.LogRecord) -> bool:
    """A filter: a client that speaks no HTTP is not worth a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        (client,) = record.args or ("somebody",)
        record.msg, record.args = (
            "%s sent what is no HTTP request: %s",
            (client, " ".join(error.message.split())),
        )
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
    return True


async def run_until(
    ended: asyncio.Event, app: web.Application, host: str, port: int, on_open: Callable[[str], None]
) -> None:
    """Serve *app* until *ended* is set and the answers under way have been given. *on_open* gets the address.

    Raises ``OSError`` when the address can't be had.
    """
    runner = web.AppRunner(
        app, handle_signals=False, handler_cancellation=True, access_log=None, shutdown_timeout=_PATIENCE_S
    )
    await runner.setup()
    server_logger.addFilter(_tell_in_one_line)
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0][1]
        on_open(f"http://{f'[{host}]' if ':' in host else host}:{bound}/v1")
        await ended.wait()
    finally:
        await runner.cleanup()
        server_logger.removeFilter(_tell_in_one_line)
