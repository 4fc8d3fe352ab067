"""The answers in the form that OpenAI's clients read, and their text while it grows."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from kvtier_core.engine import Generation


class AnswerText:
    """The text of one answer. Decides how much of it is sure: what may yet become a stop text is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._sent = 0
        self.is_stopped = False
        """Whether a stop text has come."""

    def grow(self, text: str, *, is_last: bool = False) -> str:
        """*text* is the whole answer so far. What of it is new and sure."""
        ends = [begin for stop in self._stops if (begin := text.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            sure = min(ends)
        elif is_last:
            sure = len(text)
        else:
            whole = text.rstrip("\ufffd")  # a character of several tokens, of which some are missing
            sure = len(whole) - self._begun(whole)
        new = text[self._sent : sure]
        self._sent = max(self._sent, sure)
        return new

    def _begun(self, text: str) -> int:
        """Characters at the end of *text* with which a stop text begins."""
        return max(
            (
                count
                for stop in self._stops
                for count in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:count])
            ),
            default=0,
        )


class Form:
    """The JSON of one answer, whole or in chunks."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._same = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, generation: Generation[Any]) -> dict[str, Any]:
        """The whole answer."""
        content = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self._is_chat
            else {"text": text}
        )
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._answer(kind, [_choice(content, generation.finish_reason)], usage(generation))

    def begin(self) -> list[dict[str, Any]]:
        """The chunks before any text."""
        return [self._chunk({"role": "assistant", "content": ""}, None)] if self._is_chat else []

    def chunk(self, text: str) -> dict[str, Any]:
        """The next piece of text."""
        return self._chunk({"content": text}, None) if self._is_chat else self._chunk(text, None)

    def end(self, generation: Generation[Any], *, with_usage: bool) -> list[dict[str, Any]]:
        """The chunks behind all text."""
        chunks = [self._chunk({} if self._is_chat else "", generation.finish_reason)]
        if with_usage:
            chunks.append(self._answer(self._chunk_kind, [], usage(generation)))
        return chunks

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, content: Any, finish_reason: str | None) -> dict[str, Any]:  # noqa: ANN401 - JSON
        name = "delta" if self._is_chat else "text"
        return self._answer(self._chunk_kind, [_choice({name: content}, finish_reason)], None)

    def _answer(
        self, kind: str, choices: list[dict[str, Any]], used: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {**self._same, "object": kind, "choices": choices, "usage": used}


def _choice(content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}


def usage(generation: Generation[Any]) -> dict[str, Any]:
    """The counts of tokens. ``cached_tokens`` are those whose KV was restored."""
    prompt, answer = generation.prompt_tokens, len(generation.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": generation.hit_tokens},
    }
