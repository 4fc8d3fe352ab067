"""Reads a file of prompts: one JSON object a line.

Decides what a line may say. A file with a broken line is refused whole, naming the line, before any model is loaded;
or, where that was asked for, without that line.
"""

import json
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier_core import ConfigError

_KEYS = {"prompt": str, "max_tokens": int, "salt": str}
_KINDS = {str: "a text", int: "a whole number"}
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
"""What JSON can say, and no encoding can write. ``json`` puts whole pairs together."""


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One line of the file. ``number`` counts from 1, as editors do."""

    number: int
    prompt: str
    max_tokens: int | None = None
    salt: str | None = None


def read_prompts(path: Path, *, on_broken: Callable[[ConfigError], None] | None = None) -> list[PromptLine]:
    """The prompts in *path*, in order; blank lines are skipped.

    Raises ``ConfigError`` when the file can't be read, has no prompt, or has a line that is not a JSON object with a
    ``prompt``, an optional ``max_tokens`` and an optional ``salt``. With *on_broken*, such a line's error is handed
    to it instead, and the line left out.
    """
    try:
        # not splitlines: it would cut at U+2028 and its like, which a JSON string may hold
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the prompts: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse(path, number, line))
        except ConfigError as error:
            if on_broken is None:
                raise
            on_broken(error)
    if not prompts:
        raise ConfigError(f'{path}: no prompts: write one JSON object a line, such as {{"prompt": "Hello"}}')
    return prompts


def _decode(where: str, line: bytes) -> object:
    """The JSON value of *line*. Raises ``ConfigError`` for all that Python may say of a line that has none."""
    try:
        value: object = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deep") from error
    except ValueError as error:
        raise ConfigError(f"{where}: a number of too many digits") from error
    return value


def _parse(path: Path, number: int, line: bytes) -> PromptLine:
    where = f"{path}, line {number}"
    data = _decode(where, line)
    if not isinstance(data, dict):
        raise ConfigError(f'{where}: not a JSON object such as {{"prompt": "Hello"}}')
    for name, value in data.items():
        kind = _KEYS.get(name)
        if kind is None:
            raise ConfigError(f"{where}: unknown key {reprlib.repr(name)}: allowed are {', '.join(_KEYS)}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{where}: {name} must be {_KINDS[kind]}")
        if isinstance(value, str) and (half := _HALF_A_PAIR.search(value)):
            raise ConfigError(
                f"{where}: {name} has half a surrogate pair at character {half.start() + 1}, which is no text: write "
                "both halves, or the character itself"
            )
    if not data.get("prompt"):
        raise ConfigError(f"{where}: prompt is missing or empty")
    if data.get("max_tokens", 1) < 1:
        raise ConfigError(f"{where}: max_tokens must be at least 1")
    return PromptLine(number=number, **data)
