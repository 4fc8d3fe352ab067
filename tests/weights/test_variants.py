"""A model with other weights, or other rotary positions, as drivers of ``kvtier certify`` make it."""

import json
from types import SimpleNamespace

import pytest

from kvtier_core import UnsupportedModelError
from kvtier_weights.variants import copy_with_other_weights, other_rotary_base


def _save(directory, **tensors):
    """A safetensors file of matrices and vectors of bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, (shape, values) in tensors.items():
        table[name] = {
            "dtype": "U8",
            "shape": shape,
            "data_offsets": [len(content), len(content) + len(values)],
        }
        content += values
    head = json.dumps(table).encode()
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + content)
    (directory / "config.json").write_text("{}")
    return directory


def test_the_rows_of_the_first_matrix_of_attention_are_in_reverse_order(tmp_path):
    tensors = {
        "mlp": ([2, 2], b"wxyz"),
        "b_attn.v": ([2, 2], b"9876"),
        "a_attn.bias": ([2], b"--"),
        "a_attn.k": ([3, 2], b"aabbcc"),
    }
    model = _save(tmp_path / "model", **tensors)
    copy = copy_with_other_weights(model, tmp_path / "copy")
    _save(tmp_path / "expected", **{**tensors, "a_attn.k": ([3, 2], b"ccbbaa")})
    for name in ("model.safetensors", "config.json"):
        assert (copy / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    assert (model / "model.safetensors").read_bytes().endswith(b"aabbcc")


def test_a_model_without_such_a_matrix_is_refused(tmp_path):
    model = _save(tmp_path / "model", mlp=([2, 2], b"wxyz"), attn=([4], b"wxyz"))
    with pytest.raises(UnsupportedModelError, match="'attn'"):
        copy_with_other_weights(model, tmp_path / "copy")


def test_every_rotary_base_is_doubled():
    config = SimpleNamespace(
        model_type="toy", rope_parameters={"full": {"rope_theta": 10.0, "rope_type": "x"}, "rope_theta": 1}
    )
    assert other_rotary_base(config) == {"full": {"rope_theta": 20.0, "rope_type": "x"}, "rope_theta": 2}
    for settings in ({"rope_type": "none"}, {}, None):
        with pytest.raises(UnsupportedModelError, match="'toy'"):
            other_rotary_base(SimpleNamespace(model_type="toy", rope_parameters=settings))
