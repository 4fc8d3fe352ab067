"""vLLM's server with several engines by data parallelism, asked as ``engine_program``'s one engine is."""

import json
from pathlib import Path
from typing import Any

from tests.vllm.server import Server

_KNOWN = ("model", "kv_transfer_config", "data_parallel_size", "nodes")


class Served:
    """A server that has all it needs in a directory. Its engines get the prompts in turn."""

    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        self.options = options
        self._engines = options["data_parallel_size"]
        known = {name: options[name] for name in _KNOWN if name in options}
        self._server = Server(directory=directory, **known)
        try:
            self._server.until_it_serves()
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: list[list[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
        """The tokens that follow each prompt."""
        given = [
            self._server.ask(each, max_tokens=max_tokens, rank=number % self._engines)
            for number, each in enumerate(prompts)
        ]
        return [{"tokens": tokens} for tokens, _ in given]

    def reset(self, *, connector: bool = False) -> bool:
        """In all engines."""
        said = self._server.post(f"reset_prefix_cache?reset_external={str(connector).lower()}")
        return bool(said["success"])

    def metrics_of_each(self) -> list[dict[str, float]]:
        """The counters and gauges of each engine, by name and labels as ``Engine.metrics`` has them."""
        from prometheus_client.parser import text_string_to_metric_families  # it comes with vLLM

        found: dict[str, dict[str, float]] = {str(number): {} for number in range(self._engines)}
        for family in text_string_to_metric_families(self._server.metrics()):
            for sample in family.samples if family.type in ("counter", "gauge") else ():
                labels = {**sample.labels}
                labels.pop("model_name", None)
                engine = found.get(labels.pop("engine", ""), {})
                name = sample.name.removesuffix("_total")
                engine[name + (json.dumps(labels, sort_keys=True) if labels else "")] = sample.value
        return list(found.values())

    def close(self) -> None:
        self._server.close()
