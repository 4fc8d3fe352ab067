"""An engine proves, before it serves anything, that what it loads is what the model had computed."""

import pytest
import torch
from transformers import PreTrainedModel

from kvtier_core import UnsupportedModelError
from kvtier_transformers import Engine
from kvtier_transformers.cache import BlockLayer, DeviceKV
from kvtier_transformers.models import find_smollm2, load
from kvtier_transformers.sequences import Running
from tests.transformers.misreading import MISREADINGS, misread
from tests.transformers.tiny import VOCAB, tiny_model, tokens

CONFIG = '[pool]\ncapacity = "4MiB"\n[tiers.ram]\ntype = "memory"\ncapacity = "4MiB"\n'


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "kvtier.toml"
    path.write_text(CONFIG)
    return path


def swap_keys_and_values(layers: list[BlockLayer]) -> None:
    """Of the last layer."""
    last = layers[-1]
    last._key_tokens, last._value_tokens = last._value_tokens, last._key_tokens


def swap_heads(layers: list[BlockLayer]) -> None:
    layers[0]._key_tokens = layers[0]._key_tokens.flip(2)


def swap_layers(layers: list[BlockLayer]) -> None:
    layers[0]._value_tokens, layers[1]._value_tokens = layers[1]._value_tokens, layers[0]._value_tokens


def shift_a_token(layers: list[BlockLayer]) -> None:
    layers[1]._key_tokens = layers[1]._key_tokens.roll(1, 1)


@pytest.fixture(params=[swap_keys_and_values, swap_heads, swap_layers, shift_a_token])
def wrong_adapter(request, monkeypatch):
    """An adapter that misreads what it has loaded, as after a change of the layout."""
    real = DeviceKV.cache

    def cache(self, length=0, log=None, batch=None):
        made = real(self, length, log, batch)
        if length:
            request.param(self._layers)
            for layer in self._layers:
                layer._show(length)
        return made

    monkeypatch.setattr(DeviceKV, "cache", cache)


def refused(config, what: str):
    with pytest.raises(UnsupportedModelError, match=what):
        Engine.open(tiny_model(), max_tokens=64, config=config)


def test_c05_an_adapter_that_misreads_what_it_loads_is_refused_before_anything_is_served(
    config, wrong_adapter
):
    refused(config, r"the logits behind 32 tokens differ by up to .* of")


@pytest.mark.parametrize("how", MISREADINGS)
def test_i17_c05_an_adapter_that_is_not_certified_is_refused_before_anything_is_served(config, how):
    with misread(how):
        refused(config, "other bytes came back in . of 4 tensors, the first one number 2")


@pytest.mark.real_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", MISREADINGS)
def test_i17_c05_smollm2_is_refused_where_one_layer_is_misread(config, how):
    model = load(find_smollm2()).model
    with (
        misread(how),
        pytest.raises(
            UnsupportedModelError, match="other bytes came back in . of 60 tensors, the first one number 2"
        ),
    ):
        Engine.open(model, max_tokens=64, config=config)


def test_c05_other_bytes_are_refused(config, monkeypatch):
    real = DeviceKV.cache

    def cache(self, length=0, log=None, batch=None):
        self.tensors[2][:length] *= 1 + 1e-6
        return real(self, length, log, batch)

    monkeypatch.setattr(DeviceKV, "cache", cache)
    refused(config, "other bytes came back in 1 of 4 tensors, the first one number 2")


def test_c05_a_load_that_brings_nothing_is_refused(config, monkeypatch):
    monkeypatch.setattr(Running, "_load", lambda self: 0)
    refused(config, "0 of 32 tokens came back")


def test_c05_it_can_be_left_out(config, wrong_adapter):
    with Engine.open(tiny_model(), max_tokens=64, config=config, canary=False) as engine:
        assert engine.generate(tokens(40), max_tokens=2).hit_tokens == 0


def masking(value: float) -> PreTrainedModel:
    """A model that rules out a word, as one with a padded vocabulary does."""
    model = tiny_model()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
    model.lm_head.bias.data[-1] = value
    return model


MASKS = [float("-inf"), torch.finfo(torch.float32).min]


@pytest.mark.parametrize("value", MASKS)
def test_fr5_a_model_that_rules_out_words_passes(config, value):
    with Engine.open(masking(value), max_tokens=64, config=config) as engine:
        assert engine.generate(tokens(50), max_tokens=1).first_logits[-1] == value


@pytest.mark.parametrize("value", MASKS)
def test_fr5_words_that_are_ruled_out_hide_no_misread_kv(config, wrong_adapter, value):
    with pytest.raises(UnsupportedModelError, match=r"the logits behind 32 tokens differ by up to \d"):
        Engine.open(masking(value), max_tokens=64, config=config)


@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
def test_c05_nothing_of_it_stays(tmp_path, block_size):
    config = tmp_path / "kvtier.toml"
    config.write_text(CONFIG.replace("[pool]", f"[pool]\nblock_size = {block_size}"))
    with Engine.open(tiny_model(), max_tokens=64, config=config) as engine:
        assert all(not tensor.any() for tensor in engine._kv.tensors)
        with Engine.open(tiny_model(), max_tokens=64, config=config, canary=False) as plain:
            assert engine.stats() == plain.stats()


def test_c05_an_engine_that_has_no_room_for_a_block_and_more_opens_without(config, monkeypatch):
    ran = []
    model = tiny_model()
    with Engine.open(model, max_tokens=16, config=config) as engine:
        monkeypatch.setattr(engine._sequences, "_wait_for_blocks", lambda: ran.append(1))
        assert engine.generate(tokens(8), max_tokens=2).token_ids
    assert ran == [1]


def test_c05_a_model_in_low_precision_passes(config):
    with Engine.open(tiny_model().to(torch.bfloat16), max_tokens=64, config=config) as engine:
        first = engine.generate(tokens(50), max_tokens=3)
        assert engine.generate(tokens(50), max_tokens=3).token_ids == first.token_ids
