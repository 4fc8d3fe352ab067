"""Latent attention under tensor parallelism: what all workers hold alike is on disk once (C43)."""

import pytest

from kvtier_core.proof import PROOF_BYTES, read_proof
from tests.vllm.architectures import MODELS, make
from tests.vllm.engines import connector, disk, needs_vllm, prompt
from tests.vllm.test_several_processes import until_stored

pytestmark = [needs_vllm, pytest.mark.timeout(2400)]

MODEL = MODELS["DeepSeek V2, latent attention"]
BLOCKS = 20
"""Of a prompt: vLLM makes blocks of 16 tokens for latent attention on a CPU."""


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("latent")
    make(MODEL, directory)
    return directory


def payloads(start, model, root, tensor):
    """What an engine of so many workers has on disk of a prompt, by the blocks' names."""
    options = {**MODEL.options, "tensor_parallel_size": tensor, "processes": 2 + tensor}
    options["num_gpu_blocks_override"] = 100
    engine = start(connector(disk(root, layout="files")), model=model, **options)
    engine.store(prompt(1))
    until_stored(engine, "disk", BLOCKS)
    assert engine.close() == 0
    rows = {file.name: file.read_bytes() for file in root.rglob("*.kv")}
    return {name: row[: read_proof(row[-PROOF_BYTES:]).payload_bytes] for name, row in rows.items()}


def test_c43_two_workers_leave_of_latent_attention_on_disk_what_one_alone_does(start, latent_model, tmp_path):
    alone, together = (payloads(start, latent_model, tmp_path / str(size), size) for size in (1, 2))
    assert len(alone) == BLOCKS
    assert alone.keys() == together.keys()
    for name, payload in alone.items():
        assert len(together[name]) == len(payload)
        first_layer = len(payload) // 2  # vLLM computes those behind it otherwise with two workers
        assert together[name][:first_layer] == payload[:first_layer]
