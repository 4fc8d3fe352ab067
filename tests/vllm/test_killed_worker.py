"""An engine of several workers that is killed in mid-traffic: it ends, and the next one says nothing wrong (C32)."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.vllm.architectures import MODELS, make
from tests.vllm.engines import BLOCK, EngineError, EngineProcess, connector, disk, needs_vllm, prompt
from tests.vllm.models import save_tiny_model
from tests.vllm.test_several_processes import PATIENCE_S, last_write, until_stored

pytestmark = [needs_vllm, pytest.mark.timeout(2400)]

STAGES = {"pipeline_parallel_size": 2}
LATENT = {"tensor_parallel_size": 2, "prefix_caching_of_mla": True}
WHOLE = 10 * BLOCK
"""The tokens of a prompt that can be cached."""
ROOM = {"num_gpu_blocks_override": 100}


def save_latent_model(directory):
    make(MODELS["DeepSeek V2, latent attention"], directory)
    return directory


def kill_last_worker(engine, pids):
    """The engine ends by itself then, all of it."""
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(EngineError):  # neither an answer nor none for ever
        engine.call("metrics")
    give_up = time.monotonic() + PATIENCE_S
    while left := list(filter(is_running, pids)):
        assert time.monotonic() < give_up, f"workers {left} go on"
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill_all(engine, pids):
    del pids
    engine.kill()


class Right:
    """What vLLM says that has computed a prompt behind a number of blocks from its own prefix cache."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    def __call__(self, wanted, cached):
        assert self._engine.call("reset")
        if cached:
            self._engine.generate(wanted if cached == WHOLE else wanted[: cached + 1])
        (said,) = self._engine.call("generate", prompts=[wanted])
        assert said["cached"] == cached
        return said["tokens"]


@pytest.mark.parametrize(
    ("save", "parallel", "tokens_per_block", "kill"),
    [(save_tiny_model, STAGES, BLOCK, kill_last_worker), (save_latent_model, LATENT, 16, kill_all)],
    ids=["stages, one of them", "latent attention, all"],
)
def test_c32_c43_v11_what_killed_workers_leave_is_right(
    start, tmp_path, monkeypatch, save, parallel, tokens_per_block, kill
):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    options = {"model": save(tmp_path / "model"), "processes": 4, **parallel, **ROOM}
    right = Right(start(**options))
    before_it, under_way = ([prompt(seed) for seed in seeds] for seeds in (range(1, 4), range(20, 60)))
    first = start(connector(disk(tmp_path / "root")), **options)
    pids = first.call("worker_pids")
    for wanted in before_it:  # one after another: kernels for latent attention round by what else is computed
        first.store(wanted)
    until_stored(first, "disk", WHOLE // tokens_per_block * len(before_it))
    written = last_write(tmp_path / "root")
    requests = [{"prompt": wanted, "max_tokens": 8} for wanted in under_way]
    first.send("soak", requests=requests, at_once=1, aborts={}, resets=[])
    give_up = time.monotonic() + PATIENCE_S
    while last_write(tmp_path / "root") == written:  # until blocks of these are being stored
        assert time.monotonic() < give_up, "none of the prompts was stored"
        time.sleep(0.001)
    kill(first, pids)

    second = start(connector(disk(tmp_path / "root")), **options)
    found = []
    for wanted in [*before_it, *under_way[:8]]:
        (said,) = second.call("generate", prompts=[wanted])
        assert said["tokens"] == right(wanted, said["cached"])
        found.append(said["cached"])
    assert found[: len(before_it)] == [WHOLE] * len(before_it)
    assert second.close() == 0
