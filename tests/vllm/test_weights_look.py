"""A look at a worker's weights sees every change of a bit, whatever they are made of."""

from types import SimpleNamespace

import pytest
import torch

from kvtier_vllm.weights_look import look_at_weights


def look(tensor, draft=None):
    model = torch.nn.Module()
    model.register_buffer("weight", tensor)
    return look_at_weights(SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: draft))


TENSORS = {
    "bfloat16": torch.zeros(300, 500, dtype=torch.bfloat16),
    "float8": torch.zeros(70_001, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "complex": torch.zeros(9_000, dtype=torch.complex64),
    "bool": torch.zeros(5, dtype=torch.bool),
    "one": torch.tensor(0.0),
    "not aligned": torch.zeros(100_001)[1:],
    "not contiguous": torch.zeros(200, 400).t(),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("place", [0, -1])
def test_v4_c02_a_look_sees_a_change_and_nothing_else(tensor, place):
    before = look(tensor)
    assert look(tensor) == before
    changed = tensor.clone()
    changed[(place,) * changed.dim()] = 1
    assert look(changed) != before


def test_v4_a_look_tells_shapes_and_dtypes_apart_and_takes_no_weights_at_all():
    assert len({look(torch.zeros(shape)) for shape in ((2, 3), (3, 2), (0,), (1, 0))}) == 4
    assert look(torch.zeros(4)) != look(torch.zeros(4, dtype=torch.int32))


def test_v4_c02_a_draft_models_weights_count():
    drafts = [torch.nn.Linear(2, 2) for _ in range(2)]
    assert look(torch.zeros(1), drafts[0]) != look(torch.zeros(1), drafts[1])


def test_v4_weights_without_bits_are_told_of():
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        look(torch.zeros(4, device="meta"))


def test_r8_c02_an_adapter_that_is_loaded_counts_in_engines_that_have_any():
    def look_with(*numbers):
        model = torch.nn.Linear(2, 2)
        return look_at_weights(
            SimpleNamespace(get_model=lambda: model, lora_config=object(), list_loras=lambda: set(numbers))
        )

    torch.manual_seed(0)
    one = look_with(1, 2)
    torch.manual_seed(0)
    assert look_with(2, 1) == one
    torch.manual_seed(0)
    assert look_with(1) != one
