"""Weights that a client exchanges over HTTP: every route of vLLM's server that changes them is noticed (C02)."""

import json

import pytest

from tests.plugins.distributions import Site
from tests.vllm.engines import connector, disk, needs_vllm, prompt
from tests.vllm.models import save_tiny_model
from tests.vllm.server import Server
from tests.vllm.test_tutorial import save_chat_model

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


def answers(server, wanted):
    """What follows, with the number of blocks that were loaded; and again once vLLM's own cache has been reset."""
    for _ in range(2):
        yield server.ask(wanted)
        server.ask([1, 2, 3])  # vLLM stores in the steps after
        server.post("reset_prefix_cache")


def test_v4_c02_weights_that_a_route_changes_get_no_kv_of_the_ones_before(start, tmp_path):
    mine = save_chat_model(tmp_path / "mine")
    size = json.loads((mine / "config.json").read_text())["vocab_size"]
    other = save_tiny_model(tmp_path / "other", seed=1, vocab_size=size)
    wanted = [token % size for token in prompt(1)]
    of_mine, of_other = (
        start(model=model, enable_prefix_caching=False).generate(wanted)[0] for model in (mine, other)
    )
    assert of_mine != of_other
    plugin = {"vllm.general_plugins": {"file": "from_file:register"}}
    Site(tmp_path).install("from-file", plugin, {"from_file": BACKEND})
    transfer = connector(disk(tmp_path / "root"))
    server = Server(mine, tmp_path, transfer, weight_transfer_config='{"backend": "file"}')
    try:
        server.until_it_serves()
        assert {route for route in server.get("openapi.json")["paths"] if "weight" in route} == WEIGHT_ROUTES
        assert list(answers(server, wanted)) == [(of_mine, 0), (of_mine, 10)]
        server.post("init_weight_transfer_engine", init_info={})
        server.post("start_weight_update")
        server.post("update_weights", update_info={"path": str(other / "model.safetensors")})
        server.post("finish_weight_update")
        assert list(answers(server, wanted)) == [(of_other, 0), (of_other, 10)]
        server.post("collective_rpc", method="reload_weights", kwargs={"weights_path": str(mine)})
        assert list(answers(server, wanted)) == [(of_mine, 0), (of_mine, 10)]
        server.post("weight_checker", action="reset")  # makes all weights 0
        assert list(answers(server, wanted)) == [([0] * 8, 0), ([0] * 8, 10)]
        for method in ("start_weight_update", "reload_weights", "reset_weights"):
            assert f"collective_rpc({method!r}) has changed weights" in server.log()
    finally:
        server.close()
