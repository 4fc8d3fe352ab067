"""Weights that a client exchanges over HTTP: every route of vLLM's server that changes them is noticed (C02)."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tests.plugins.distributions import Site
from tests.vllm.engines import BLOCK, QUIET, START_S, connector, disk, needs_vllm, prompt
from tests.vllm.models import save_tiny_model
from tests.vllm.test_tutorial import free_port, save_chat_model

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]

BACKEND = '''
from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class Nothing: ...


@dataclass
class File:
    path: str


class FromFile(WeightTransferEngine):
    """Takes weights from a file, where vLLM's own backends have them from a trainer's GPU."""

    init_info_cls = Nothing
    update_info_cls = File

    def init_transfer_engine(self, info): ...
    def shutdown(self): ...
    def receive_weights(self, info): ...

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def update_weights(self, info):
        self.model.load_weights(load_file(self.parse_update_info(info).path).items())

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)


def register():
    WeightTransferEngineFactory.register_engine("file", FromFile)
'''
WEIGHT_ROUTES = {
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_info",
    "/weight_checker",
}
"""Those of vLLM 0.32. One more needs a look at how it reaches the workers."""


class Server:
    """vLLM's own, with the routes that its development mode adds."""

    def __init__(self, model, directory, kv_transfer_config):
        plugin = {"vllm.general_plugins": {"file": "from_file:register"}}
        Site(directory).install("from-file", plugin, {"from_file": BACKEND})
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
            "weight-transfer-config": json.dumps({"backend": "file"}),
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

    def answers(self, wanted):
        """What follows, with the number of blocks that were loaded; and again once vLLM's own cache has been reset."""
        ask = {
            "model": "tiny",
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for _ in range(2):
            said = self.post("v1/completions", prompt=wanted, **ask)
            cached = (said["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
            yield said["choices"][0]["token_ids"], cached // BLOCK
            self.post("v1/completions", prompt=[1, 2, 3], **ask)  # vLLM stores in the steps after
            self.post("reset_prefix_cache")

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(START_S)
        finally:
            self._process.kill()


def test_v4_c02_weights_that_a_route_changes_get_no_kv_of_the_ones_before(start, tmp_path):
    mine = save_chat_model(tmp_path / "mine")
    size = json.loads((mine / "config.json").read_text())["vocab_size"]
    other = save_tiny_model(tmp_path / "other", seed=1, vocab_size=size)
    wanted = [token % size for token in prompt(1)]
    of_mine, of_other = (
        start(model=model, enable_prefix_caching=False).generate(wanted)[0] for model in (mine, other)
    )
    assert of_mine != of_other
    server = Server(mine, tmp_path, connector(disk(tmp_path / "root")))
    try:
        server.until_it_serves()
        assert {route for route in server.get("openapi.json")["paths"] if "weight" in route} == WEIGHT_ROUTES
        assert list(server.answers(wanted)) == [(of_mine, 0), (of_mine, 10)]
        server.post("init_weight_transfer_engine", init_info={})
        server.post("start_weight_update")
        server.post("update_weights", update_info={"path": str(other / "model.safetensors")})
        server.post("finish_weight_update")
        assert list(server.answers(wanted)) == [(of_other, 0), (of_other, 10)]
        server.post("collective_rpc", method="reload_weights", kwargs={"weights_path": str(mine)})
        assert list(server.answers(wanted)) == [(of_mine, 0), (of_mine, 10)]
        server.post("weight_checker", action="reset")  # makes all weights 0
        assert list(server.answers(wanted)) == [([0] * 8, 0), ([0] * 8, 10)]
        for method in ("start_weight_update", "reload_weights", "reset_weights"):
            assert f"collective_rpc({method!r}) has changed weights" in server.log()
    finally:
        server.close()
