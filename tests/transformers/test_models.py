import json

import pytest

from kvtier_core import ConfigError
from kvtier_transformers import load
from tests.transformers.tiny import save_model, tiny_model


def test_c02_a_checkpoint_that_lacks_tensors_is_refused_as_transformers_would_make_them_up(tmp_path):
    path = save_model(tiny_model(), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lack \d+ of the model's tensors \(such as model\.layers"):
        load(path)


def test_a_whole_checkpoint_loads(tmp_path):
    assert load(save_model(tiny_model(), tmp_path / "model")).model.name_or_path == str(tmp_path / "model")
