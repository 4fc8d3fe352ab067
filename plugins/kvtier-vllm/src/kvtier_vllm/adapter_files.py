"""Looks at the files of LoRA adapters, and reads them, on threads of its own: they may be on a network (C31).

Decides nothing about adapters. Names no vLLM type.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from kvtier_weights import digest_weights, look_at_file

_FILES = "adapter_*"
"""What vLLM reads: ``adapter_config.json`` and one of ``adapter_model.safetensors``, ``.bin`` and ``.pt``."""
IDENTITY_BYTES = 12
"""With vLLM's hash of 32 bytes and the group's number a key has 48 then, the most that kvtier-disk takes."""

Looks = list[list[int | str] | None]
"""One of each file; ``None`` for a file whose times tell nothing. Empty if there is none."""


class AdapterFiles:
    """Two threads, so that no look waits for the reading of a large file."""

    def __init__(self) -> None:
        self._looks, self._digests = _Thread("kvtier-adapter-looks"), _Thread("kvtier-adapter-digests")

    def look(self, path: str) -> Future[Looks]:
        """The look at the files in the directory *path*."""
        return self._looks.run(lambda: _look_at(path))

    def digest(self, path: str, kind: object) -> Future[tuple[bytes, Looks]]:
        """What stands for the files' content and for *kind*, and a look that was taken after the reading."""
        return self._digests.run(lambda: (_identity_of(path, kind), _look_at(path)))

    def close(self) -> None:
        """Begin nothing more. Does not wait for what is under way."""
        self._looks.close()
        self._digests.close()


class _Thread:
    """Does one thing after another. Starts with the first one, and keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.put((future, work))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        return future

    def _serve(self) -> None:
        while (errand := self._queue.get()) is not None:
            future, work = errand
            future.set_running_or_notify_cancel()
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - it is the future's
                future.set_exception(error)

    def close(self) -> None:
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)


def _files_at(path: str) -> list[Path]:
    directory = Path(os.path.expanduser(path))  # noqa: PTH111 - as vLLM does, which raises nothing
    return sorted(file for file in directory.glob(_FILES) if file.is_file())


def _look_at(path: str) -> Looks:
    return [look_at_file(file) for file in _files_at(path)]


def _identity_of(path: str, kind: object) -> bytes:
    content = json.dumps([digest_weights(_files_at(path)), kind])
    return hashlib.sha256(content.encode()).digest()[:IDENTITY_BYTES]
