"""Starts an engine in a process of its own, asks it, ends or kills it.

Decides what the engine's process gets of this one's environment, how long an answer may take, and what is said of an
engine that ends by itself. Nothing that it started is left when it is over.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvtier.certify.drivers import Answer, Opening
from kvtier_core.errors import KvtierError
from kvtier_core.masking import mask_text

_ANSWER_S = 1800.0
"""For one answer: a large model that starts takes minutes. An engine that hangs must end some time."""
_SETTLE_S = 300.0
_END_S = 60.0
_TAIL_CHARACTERS = 3000
_QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class EngineError(KvtierError):
    """The engine's process ended or fell silent; the message has the end of what it said."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an engine says of itself once it is open."""

    tokens_per_block: int
    vocab_size: int
    dtype: str
    can_reset: bool


class EngineProcess:
    """One open engine. Used by one thread."""

    def __init__(self, engine: str, blocked: Collection[str], opening: Opening, log: Path) -> None:
        """Start the process and wait until the engine is open. Raises what the driver raises, or ``EngineError``."""
        self._log = log
        self._connection, theirs = Pipe()
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | _QUIET
        with theirs, log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtier.certify.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that all that the engine starts can be killed with it
            )
        try:
            self._send((engine, blocked, opening))
            self.facts: Facts = self._receive()
        except BaseException:
            self.kill()
            raise

    def ask(self, token_ids: Sequence[int], first: int = 0) -> Answer:
        """As the driver's."""
        answer: Answer = self._call("ask", list(token_ids), first)
        return answer

    def settle(self) -> None:
        """As the driver's. Raises ``EngineError`` when it takes too long."""
        if not self._call("settle", _SETTLE_S):
            raise EngineError(f"the tiers did not take all blocks within {_SETTLE_S:g} s")

    def forget_device(self) -> None:
        """As the driver's."""
        self._call("forget_device")

    def reset(self) -> None:
        """As the driver's."""
        self._call("reset")

    def close(self) -> None:
        """End the engine and its process. Twice is fine."""
        if self._process.returncode is None:
            try:
                self._call("close")
                self._await_end()
            finally:
                self.kill()

    def kill(self) -> None:
        """SIGKILL to the process and whatever it started. Twice is fine."""
        if self._process.returncode is None:  # until it is waited for, its number is no other's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - as many types as methods
        self._send((method, arguments))
        return self._receive()

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self) -> Any:  # noqa: ANN401 - as many types as methods
        try:
            if not self._connection.poll(_ANSWER_S):
                raise EngineError(
                    f"the engine did not answer within {_ANSWER_S:g} s; its log ends:\n{end_of(self._log)}"
                )
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended() from None
        if isinstance(answer, KvtierError):
            raise answer
        return answer

    def _ended(self) -> EngineError:
        self._await_end()
        self.kill()
        status = self._process.returncode
        return EngineError(
            f"the engine's process ended by itself, with status {status}; its log ends:\n{end_of(self._log)}"
        )

    def _await_end(self) -> None:
        """Give the process time to end, without waiting for its status: ``kill`` needs its number."""
        descriptor = os.pidfd_open(self._process.pid)
        try:
            select.select([descriptor], [], [], _END_S)
        finally:
            os.close(descriptor)


def end_of(log: Path) -> str:
    """The last 3,000 characters of an engine's log, without what must not be shown."""
    return mask_text(log.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip())
