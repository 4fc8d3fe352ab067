"""vLLM's own server over HTTP, with the routes that its development mode adds."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tests.vllm.engines import BLOCK, QUIET, START_S
from tests.vllm.test_tutorial import free_port


class Server:
    """vLLM's own, with the routes that its development mode adds."""

    def __init__(self, model, directory, kv_transfer_config, **options):
        self._log = directory / "server.log"
        self._address = f"http://127.0.0.1:{(port := free_port())}"
        options = {
            "model": model,
            "dtype": "float32",
            "block-size": BLOCK,
            "num-gpu-blocks-override": 40,
            "max-model-len": 1024,
            "served-model-name": "tiny",
            "port": port,
            "kv-transfer-config": json.dumps(kv_transfer_config),
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--enforce-eager", "--enable-prompt-tokens-details"]
        command += [f"--{name}={value}" for name, value in options.items()]
        search = os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **QUIET, "PYTHONPATH": search, "VLLM_SERVER_DEV_MODE": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def log(self):
        return self._log.read_text(errors="replace")

    def until_it_serves(self):
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, self.log()
            try:
                return self.get("health")
            except urllib.error.URLError:
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.2)

    def get(self, route):
        return self._send(route, None)

    def post(self, route, **body):
        return self._send(route, json.dumps(body).encode())

    def _send(self, route, body):
        request = urllib.request.Request(
            f"{self._address}/{route}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.loads(answer.read() or "null")

    def ask(self, wanted):
        """What follows, and the number of blocks that were not computed."""
        said = self.post(
            "v1/completions",
            prompt=wanted,
            model="tiny",
            max_tokens=8,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
        )
        cached = (said["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
        return said["choices"][0]["token_ids"], cached // BLOCK

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(START_S)
        finally:
            self._process.kill()
