"""What a client asks for, read from the JSON of its request.

Decides which requests are served. An option that would change the answer in a way that this server can't is refused by
name; nothing that a client says is left out silently.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ROLES = ("system", "user", "assistant")
_MOST_STOPS = 4
_LONGEST_STOP = 256
"""Characters. The end of a streamed answer is held back while it may be the beginning of one."""
_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for text completions."""
_SERVED: Mapping[str, Sequence[object]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Options that change an answer, and the values with which it is the one that is given here."""
_WITHOUT_EFFECT = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Options that change nothing in an answer."""
_READ = {
    "cache_salt",
    "max_tokens",
    "model",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
}
_HOTTEST = 2
_MOST_SEED = 1 << 63
Body = Mapping[str, Any]


class RefusedError(Exception):
    """A request that is not served, as OpenAI's clients understand it."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def as_json(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004 - HTTP's
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One completion that is wanted."""

    prompt: str | tuple[Mapping[str, str], ...]
    """A text, or the messages of a conversation."""
    max_tokens: int | None
    """``None``: as many as there is room for."""
    temperature: float
    """0: the likeliest token each time."""
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    salt: str | None
    is_streamed: bool
    wants_usage: bool
    """At the end of a stream."""

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation."""
        return not isinstance(self.prompt, str)

    @property
    def characters(self) -> int:
        """Those of the prompt."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(message["content"]) for message in self.prompt)


def read_completion(body: object, model: str) -> Asked:
    """What the body of ``/v1/completions`` asks of *model*. Raises ``RefusedError``."""
    options = _options(body, model, {"prompt"})
    prompt = options.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise RefusedError("prompt must be one text that is not empty", param="prompt")
    return _asked(options, _text(prompt, "prompt"), options.get("max_tokens", _DEFAULT_COMPLETION_TOKENS))


def read_chat(body: object, model: str) -> Asked:
    """What the body of ``/v1/chat/completions`` asks of *model*. Raises ``RefusedError``."""
    options = _options(body, model, {"messages", "max_completion_tokens"})
    messages = options.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages must be a list that is not empty", param="messages")
    chat = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    return _asked(options, chat, options.get("max_completion_tokens", options.get("max_tokens")))


def _options(body: object, model: str, more: set[str]) -> Body:
    """What is set in *body*, none of which would be passed over. ``null`` is as good as not set."""
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    options = {name: value for name, value in body.items() if value is not None}
    if (asked := options.get("model", model)) != model:
        raise RefusedError(
            f"there is no model {reprlib.repr(asked)} here, only {model!r}",
            param="model",
            status=404,
            code="model_not_found",
        )
    for name, value in options.items():
        served = _SERVED.get(name)
        if served is not None and not any(_is_same(value, one) for one in served):
            raise RefusedError(
                f"{name}={reprlib.repr(value)} can't be served: leave it out, or send {' or '.join(map(repr, served))}",
                param=name,
            )
        if served is None and name not in _WITHOUT_EFFECT | _READ | more:
            raise RefusedError(f"{reprlib.repr(name)} is not known here: leave it out", param=name)
    return options


def _is_same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _asked(options: Body, prompt: str | tuple[Mapping[str, str], ...], max_tokens: object) -> Asked:
    if (
        isinstance(max_tokens, bool)
        or not isinstance(max_tokens, int | None)
        or (max_tokens is not None and max_tokens < 1)
    ):
        raise RefusedError("max_tokens must be a whole number of at least 1", param="max_tokens")
    seed = options.get("seed")
    if (
        isinstance(seed, bool)
        or not isinstance(seed, int | None)
        or not -_MOST_SEED <= (seed or 0) < _MOST_SEED
    ):
        raise RefusedError("seed must be a whole number of at most 64 bits", param="seed")
    stops = options.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not (
        isinstance(stops, list)
        and len(stops) <= _MOST_STOPS
        and all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops)
    ):
        raise RefusedError(
            f"stop must be a text, or up to {_MOST_STOPS}, of 1 to {_LONGEST_STOP} characters", param="stop"
        )
    is_streamed = _flag(options, "stream")
    stream_options = options.get("stream_options", {})
    if not isinstance(stream_options, dict):
        raise RefusedError("stream_options must be an object", param="stream_options")
    salt = options.get("cache_salt")
    return Asked(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=_number(options, "temperature", 0.0, _HOTTEST),
        top_p=_number(options, "top_p", 1.0, 1),
        seed=seed,
        stops=tuple(stops),
        salt=None if salt is None else _text(salt, "cache_salt"),
        is_streamed=is_streamed,
        wants_usage=_flag(stream_options, "include_usage"),
    )


def _number(options: Body, name: str, default: float, most: int) -> float:
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise RefusedError(f"{name} must be a number from 0 to {most}", param=name)
    return float(value)


def _flag(options: Body, name: str) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise RefusedError(f"{name} must be true or false", param=name)
    return value


def _message(message: object, where: str) -> Mapping[str, str]:
    if not isinstance(message, dict):
        raise RefusedError(f"{where} must be an object with role and content", param=where)
    given = {name: value for name, value in message.items() if value is not None}
    if unknown := sorted(set(given) - {"role", "content", "name"}):
        raise RefusedError(f"{where} has {unknown[0]!r}, which is not known here: leave it out", param=where)
    if given.get("role") not in _ROLES:
        raise RefusedError(f"{where}.role must be one of {', '.join(_ROLES)}", param=where)
    content = given.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise RefusedError(f"{where}.content has a part that is no text", param=where)
        content = "".join(_text(part.get("text"), where) for part in content)
    return {"role": given["role"], "content": _text(content, where)}


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise RefusedError(f"{where} must be a text", param=where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RefusedError(
            f"{where} has half a surrogate pair at character {error.start + 1}, which is no text", param=where
        ) from None
    return value
