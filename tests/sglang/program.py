"""A program: one SGLang engine. It answers what ``engines.Engine`` asks over a connection, and ends when that does.

It runs apart from the tests, and from other engines: SGLang's shutdown kills all that its process has started.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


class Served:
    """SGLang, behind the few questions that tests ask."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from sglang import Engine

        self._engine = Engine(**arguments)

    def ask(self, prompts: Sequence[list[int]], tokens: int, more: dict[str, Any]) -> list[dict[str, Any]]:
        """What SGLang says of greedy answers to prompts that are sent together."""
        found = self._engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            return_logprob=True,
            **more,
        )
        return [item["meta_info"] for item in found]

    def flush(self) -> None:
        """Empty the device's cache, once SGLang is idle."""
        deadline = time.monotonic() + 120
        while not self._engine.flush_cache().success:
            assert time.monotonic() < deadline, "SGLang did not become idle"
            time.sleep(0.05)

    def clear_storage(self) -> None:
        """Have HiCache's storage forget all."""
        manager = self._engine.tokenizer_manager
        assert self._engine.loop.run_until_complete(manager.clear_hicache_storage()).success

    def update_weights(self, model: str, more: dict[str, Any]) -> None:
        """Load other weights from disk."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        order = UpdateWeightFromDiskReqInput(model_path=model, load_format="auto", **more)
        success, message, *_ = self._engine.loop.run_until_complete(
            self._engine.tokenizer_manager.update_weights_from_disk(order, None)
        )
        assert success, message

    def figures(self) -> dict[str, Any]:
        """What kvtier counts."""
        (state,) = self._engine.get_server_info()["internal_states"]
        found: dict[str, Any] = state["kvtier"]
        return found

    def close(self) -> None:
        """End all of SGLang's processes."""
        self._engine.shutdown()


def main() -> None:
    """Open the engine, then answer until there is nobody to answer."""
    with Connection(int(sys.argv[1])) as connection, suppress(EOFError):
        served = Served(connection.recv())
        connection.send(None)
        try:
            while True:
                method, arguments = connection.recv()
                connection.send(getattr(served, method)(*arguments))
        finally:
            served.close()


if __name__ == "__main__":
    main()
