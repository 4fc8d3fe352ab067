"""Two engines of real vLLM whose KV is not interchangeable share a disk and no block of it (C02)."""

import pytest

from tests.vllm.engines import connector, disk, needs_vllm, prompt
from tests.vllm.models import LONGROPE, SIZES, save_model, save_tiny_model

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]


def with_longrope(directory):
    save_model(directory, "Phi3ForCausalLM", **SIZES, **LONGROPE)
    yield {"max_model_len": 512}
    yield {"max_model_len": 1024}


def with_another_file(directory):
    """What is loaded is beside a file that stays as it is."""
    import torch
    from safetensors.torch import load_file

    save_tiny_model(directory)
    weights = load_file(directory / "model.safetensors")
    for shift in (0, 1):
        torch.save({name: weight.roll(shift, 0) for name, weight in weights.items()}, directory / "model.pt")
        yield {"load_format": "pt"}


@pytest.mark.parametrize("engines", [with_longrope, with_another_file])
def test_c02_what_another_engine_computed_otherwise_is_not_loaded(start, tmp_path, engines):
    wanted = [prompt(seed) for seed in (1, 2)]
    said = []
    for options in engines(tmp_path / "model"):
        engine = start(connector(disk(tmp_path / "root")), model=tmp_path / "model", **options)
        said.append(engine.store(*wanted))
        books = engine.call("settle")
        assert books["hits"] == {}
        assert books["stored"] == {"disk": 20}
        assert engine.close() == 0
    assert said[0] != said[1], "the two compute the same: this proves nothing"
