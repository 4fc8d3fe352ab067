"""All of a model's state that its KV depends on is part of its identity: at open, after a restart, and while open."""

import types
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvtier_core import KvtierError, UnsupportedModelError
from kvtier_transformers.engine import Engine
from kvtier_transformers.namespace import namespace_for
from tests.transformers.tiny import device_kv, save_model, tiny_model, tokens, write_settings

PROMPT = tokens(100)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model(tiny_model(), tmp_path_factory.mktemp("model"))


def loaded(directory):
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)


def open_engine(model, settings):
    return Engine.open(model, config=settings, max_tokens=128)


def name_of(model):
    return namespace_for(model, device_kv(model)).name


OF_THE_FILE = 1.0
IN_A_TABLE = {"strength": [1.0]}
IN_A_TENSOR = torch.ones(1)
ELSEWHERE = types.ModuleType("somebodys_settings")
vars(ELSEWHERE)["strength"] = 1.0
OF_A_HELPER = 1.0


def _from_outside():
    def kept():
        return IN_A_TABLE["strength"][0] * OF_A_HELPER

    return kept


_helper = _from_outside()


class Settings:
    __slots__ = ("strength",)

    def __init__(self):
        self.strength = 1.0


@dataclass
class Options:
    strength: float = 1.0
    by_layer: dict[int, float] = field(default_factory=lambda: {0: 1.0})


class Adapter(torch.nn.Module):
    """What a user puts around a layer, with its strength wherever such a thing is kept."""

    of_all = 1.0

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.strength = 1.0
        self.options = Options()
        self.settings = Settings()
        self.number = np.float32(1.0)
        self.array = np.ones(2, np.float32)
        self.plain = torch.ones(1)
        self.unregistered = [torch.nn.Linear(1, 1, bias=False)]
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, states):
        kept = (self.strength, self.options.strength, self.options.by_layer[0], self.settings.strength)
        for strength in (
            *kept,
            float(self.number),
            float(self.array[0]),
            self.plain,
            self.scale,
            self.hidden,
        ):
            states = states * strength
        states = states * (OF_THE_FILE * IN_A_TENSOR * ELSEWHERE.strength * self.helped())
        return self.inner(states) * self.of_all

    @staticmethod
    def helped():
        return _helper()


def adapted(model):
    attention = model.model.layers[0].self_attn
    attention.v_proj = Adapter(attention.v_proj)
    with torch.no_grad():
        attention.v_proj.unregistered[0].weight.fill_(1)
    return model


def adapter_of(model):
    return model.model.layers[0].self_attn.v_proj


def _rope_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(1.5)


def _rope_buffer_unseen_by_torch(model):
    model.model.rotary_emb.inv_freq.data.mul_(1.5)


def _rope_scale(model):
    model.model.rotary_emb.attention_scaling = 1.5


def _attention_scale(model):
    model.model.layers[1].self_attn.scaling *= 2


def _norm(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def _activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def _order_of_layers(model):
    model.model.layers = torch.nn.ModuleList([*model.model.layers[::-1]])


def _attention_function(model):
    model.set_attn_implementation("eager")


def _configuration_of_one_module(model):
    attention = model.model.layers[1].self_attn
    attention.config = type(attention.config)(**{**attention.config.to_dict(), "rms_norm_eps": 0.5})


PLAIN_CHANGES = [
    _rope_buffer,
    _rope_buffer_unseen_by_torch,
    _rope_scale,
    _attention_scale,
    _norm,
    _activation,
    _order_of_layers,
    _attention_function,
    _configuration_of_one_module,
]


def _adapters_float(model):
    adapter_of(model).strength = 2.0


def _adapters_buffer(model):
    adapter_of(model).scale.fill_(2)


def _adapters_hidden_buffer(model):
    adapter_of(model).hidden.data.fill_(2)


def _adapters_tensor(model):
    adapter_of(model).plain.data.fill_(2)


def _adapters_options(model):
    adapter_of(model).options.strength = 2.0


def _adapters_table(model):
    adapter_of(model).options.by_layer[0] = 2.0


def _adapters_slot(model):
    adapter_of(model).settings.strength = 2.0


def _adapters_numpy_number(model):
    adapter_of(model).number = np.float32(2.0)


def _adapters_numpy_array(model):
    adapter_of(model).array[:] = 2.0


def _adapters_unregistered_module(model):
    adapter_of(model).unregistered[0].weight.data.fill_(2)


def _adapters_class(model):
    Adapter.of_all = 2.0


def _adapters_global(_model):
    globals()["OF_THE_FILE"] = 2.0


def _adapters_global_table(_model):
    IN_A_TABLE["strength"][0] = 2.0


def _adapters_global_tensor(_model):
    IN_A_TENSOR.data.fill_(2)


def _adapters_other_module(_model):
    vars(ELSEWHERE)["strength"] = 2.0


def _adapters_helpers_global(_model):
    globals()["OF_A_HELPER"] = 2.0


ADAPTER_CHANGES = [
    _adapters_float,
    _adapters_buffer,
    _adapters_hidden_buffer,
    _adapters_tensor,
    _adapters_options,
    _adapters_table,
    _adapters_slot,
    _adapters_numpy_number,
    _adapters_numpy_array,
    _adapters_unregistered_module,
    _adapters_class,
    _adapters_global,
    _adapters_global_table,
    _adapters_global_tensor,
    _adapters_other_module,
    _adapters_helpers_global,
]


def _twice(*given):
    return given[-1] * 2


def _hook(model):
    model.model.layers[0].self_attn.v_proj.register_forward_hook(_twice)


def _pre_hook(model):
    model.model.layers[1].register_forward_pre_hook(lambda _module, args: (args[0] * 2, *args[1:]))


def _hook_on_every_module(_model):
    torch.nn.modules.module.register_module_forward_hook(
        lambda module, _args, output: output * 2 if isinstance(module, torch.nn.Linear) else output
    )


def _pre_hook_on_every_module(_model):
    def twice_if_linear(module: torch.nn.Module, args: Any) -> Any:
        return (args[0] * 2,) if isinstance(module, torch.nn.Linear) else args

    torch.nn.modules.module.register_module_forward_pre_hook(cast("Any", twice_if_linear))


def _forward_of_one_module(model):
    projection = model.model.layers[0].self_attn.v_proj
    plain = projection.forward
    projection.forward = lambda states: plain(states) * 2


def _another_method_of_one_module(model):
    norm = model.model.norm
    norm._call_impl = types.MethodType(lambda self, states: self.forward(states) * 2, norm)


def _forward_of_a_class(_model):
    plain = llama.LlamaMLP.forward
    llama.LlamaMLP.forward = lambda self, states: plain(self, states) * 2


def _call_of_every_module(_model):
    plain = torch.nn.Linear.forward
    setattr(torch.nn.Linear, "forward", lambda self, states: plain(self, states) * 2)  # noqa: B010 - mypy knows better


def _function_of_the_model_file(_model):
    llama.apply_rotary_pos_emb = lambda q, k, *_args, **_options: (q, k)


def _function_of_torch(_model):
    plain = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = lambda *args, **options: plain(*args, **options) * 2


def _foreign_attention(model):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["of_my_own"] = lambda *args, **options: None
    model.config._attn_implementation = "of_my_own"


CODE_CHANGES = {
    _hook: r"forward hook on model\.layers\.0\.self_attn\.v_proj",
    _pre_hook: r"forward pre-hook on model\.layers\.1",
    _hook_on_every_module: "forward hook on every module",
    _pre_hook_on_every_module: "forward pre-hook on every module",
    _forward_of_one_module: r"forward of model\.layers\.0\.self_attn\.v_proj is replaced",
    _another_method_of_one_module: r"_call_impl of model\.norm is replaced",
    _forward_of_a_class: r"LlamaMLP\.forward",
    _call_of_every_module: r"Linear\.forward",
    _function_of_the_model_file: r"modeling_llama\.apply_rotary_pos_emb",
    _function_of_torch: r"torch\.nn\.functional\.scaled_dot_product_attention",
    _foreign_attention: "attention 'of_my_own'",
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Whatever a case does to classes, modules and torch itself is undone."""
    for owner, name in (
        (Adapter, "of_all"),
        (llama.LlamaMLP, "forward"),
        (torch.nn.Linear, "forward"),
        (llama, "apply_rotary_pos_emb"),
        (torch.nn.functional, "scaled_dot_product_attention"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("OF_THE_FILE", "OF_A_HELPER"):
        monkeypatch.setitem(globals(), name, 1.0)
    monkeypatch.setitem(vars(ELSEWHERE), "strength", 1.0)
    yield
    IN_A_TABLE["strength"][0] = 1.0
    IN_A_TENSOR.data.fill_(1)
    torch.nn.modules.module._global_forward_hooks.clear()
    torch.nn.modules.module._global_forward_pre_hooks.clear()


def fill(model, settings):
    with open_engine(model, settings) as engine:
        engine.generate(PROMPT, max_tokens=1)
        assert engine.generate(PROMPT, max_tokens=1).hit_tokens == 96
        assert engine.flush(60)


def is_refused_or_missed(model, settings):
    try:
        with open_engine(model, settings) as engine:
            return engine.generate(PROMPT, max_tokens=1).hit_tokens == 0
    except KvtierError:
        return True


@pytest.mark.parametrize("change", [*PLAIN_CHANGES, *CODE_CHANGES])
def test_r1_a_model_changed_in_memory_gets_nothing_of_the_other_one(tmp_path, directory, change):
    settings = write_settings(tmp_path)
    fill(loaded(directory), settings)
    with open_engine(loaded(directory), settings) as engine:
        assert engine.generate(PROMPT, max_tokens=1).hits_by_tier == {"disk": 96}
    changed = loaded(directory)
    change(changed)
    assert is_refused_or_missed(changed, settings)


@pytest.mark.parametrize("change", ADAPTER_CHANGES)
def test_r1_an_adapter_of_another_strength_gets_nothing_of_the_other_one(tmp_path, directory, change):
    settings = write_settings(tmp_path)
    fill(adapted(loaded(directory)), settings)
    changed = adapted(loaded(directory))
    change(changed)
    assert is_refused_or_missed(changed, settings)


@pytest.mark.parametrize("change", [*PLAIN_CHANGES, *ADAPTER_CHANGES, *CODE_CHANGES])
def test_r1_a_model_changed_under_an_open_engine_is_refused(tmp_path, directory, change):
    model = loaded(directory)
    if change in ADAPTER_CHANGES:
        adapted(model)
    with open_engine(model, write_settings(tmp_path)) as engine:
        engine.generate(PROMPT, max_tokens=1)
        change(model)
        with pytest.raises(KvtierError):
            engine.generate(PROMPT, max_tokens=1)


@pytest.mark.parametrize(("change", "words"), CODE_CHANGES.items())
def test_r1_code_that_can_not_be_told_is_refused_by_name(tmp_path, directory, change, words):
    model = loaded(directory)
    change(model)
    with pytest.raises(UnsupportedModelError, match=words):
        open_engine(model, write_settings(tmp_path))


def quantized(directory, dtype):
    plain = loaded(directory)
    return torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, dtype=dtype)


@pytest.mark.filterwarnings("ignore")
def test_r1_packed_weights_count(tmp_path, directory):
    settings = write_settings(tmp_path)
    fill(quantized(directory, torch.qint8), settings)
    with open_engine(quantized(directory, torch.qint8), settings) as engine:
        assert engine.generate(PROMPT, max_tokens=1).hits_by_tier == {"disk": 96}
    assert is_refused_or_missed(quantized(directory, torch.float16), settings)


@pytest.mark.filterwarnings("ignore")
def test_r1_packed_weights_exchanged_under_an_open_engine_are_refused(tmp_path, directory):
    model, other = (quantized(directory, torch.qint8) for _ in range(2))
    with open_engine(model, write_settings(tmp_path)) as engine:
        engine.generate(PROMPT, max_tokens=1)
        layer = model.model.layers[0].mlp.up_proj
        weight, bias = other.model.layers[1].mlp.up_proj._packed_params._weight_bias()
        layer._packed_params.set_weight_bias(weight, bias)
        with pytest.raises(KvtierError, match="changed since"):
            engine.generate(PROMPT, max_tokens=1)


def test_r1_a_part_of_the_model_put_into_training_mode_is_noticed(tmp_path, directory):
    model = loaded(directory)
    before = name_of(model)
    with open_engine(model, write_settings(tmp_path)) as engine:
        model.model.layers[1].train()
        with pytest.raises(KvtierError, match="changed since"):
            engine.generate(PROMPT, max_tokens=1)
        assert name_of(model) != before
        model.eval()
        engine.generate(PROMPT, max_tokens=1)


def test_r1_what_lies_in_memory_in_another_order_is_watched_too(tmp_path, directory):
    model = loaded(directory)
    projection = model.model.layers[0].self_attn.v_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().t().contiguous().t())
    with open_engine(model, write_settings(tmp_path)) as engine:
        engine.generate(PROMPT, max_tokens=1)
        projection.weight.data.mul_(2)
        with pytest.raises(KvtierError, match="changed since"):
            engine.generate(PROMPT, max_tokens=1)


def test_r1_what_is_changed_between_loading_and_storing_is_not_stored(tmp_path, directory):
    from kvtier_transformers.compat import cache_keyword

    model = loaded(directory)
    with open_engine(model, write_settings(tmp_path)) as engine:
        with engine.cache_for(PROMPT) as prompt, torch.no_grad():
            _attention_scale(model)
            model(input_ids=torch.tensor([PROMPT]), **{cache_keyword(model): prompt.cache})
            with pytest.raises(KvtierError, match="changed since"):
                prompt.store(PROMPT)
        model.model.layers[1].self_attn.scaling /= 2
        assert engine.generate(PROMPT, max_tokens=1).hit_tokens == 0


def test_r1_an_adapter_of_foreign_code_is_known_to_its_own_engine_only(tmp_path, directory, caplog):
    settings = write_settings(tmp_path)
    fill(adapted(loaded(directory)), settings)
    assert "model.layers.0.self_attn.v_proj" in caplog.text
    assert "Adapter" in caplog.text
    assert is_refused_or_missed(adapted(loaded(directory)), settings)  # its code may be another by now


def test_r1_what_can_not_be_read_is_refused_by_name(tmp_path, directory):
    for odd in (iter([1.0]), torch.nn.Parameter(torch.eye(4).to_sparse()), torch.empty(2, device="meta")):
        model = loaded(directory)
        model.model.layers[0].odd = odd
        with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.odd"):
            open_engine(model, write_settings(tmp_path))


def test_r1_what_does_not_matter_changes_nothing(tmp_path, directory):
    """Settings of generation, output recorders, compiled calls, and what transformers notes for itself."""
    model, settings = loaded(directory), write_settings(tmp_path)
    before = name_of(model)
    with open_engine(model, settings) as engine:
        engine.generate(PROMPT, max_tokens=1)
        model.generation_config.temperature = 0.5
        model.warnings_issued = {"a": True}
        model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=False)
        model.model.layers[0].mlp.forward = model.model.layers[
            0
        ].mlp.forward  # as transformers 4.57 leaves it
        assert engine.generate(PROMPT, max_tokens=1).hit_tokens == 96
    assert name_of(model) == before


def test_r1_modules_that_torch_makes_are_told_too(directory):
    """A parametrization lives in a class of torch's own, its weights below another name."""
    plain, scaled = loaded(directory), loaded(directory)
    torch.nn.utils.parametrizations.weight_norm(scaled.model.layers[0].self_attn.v_proj)
    assert name_of(plain) != name_of(scaled)
    again = loaded(directory)
    torch.nn.utils.parametrizations.weight_norm(again.model.layers[0].self_attn.v_proj)
    assert name_of(again) == name_of(scaled)


@pytest.mark.parametrize("shape", ["star", "none"])
def test_r13_a_forward_that_takes_anything_is_refused_by_name(tmp_path, shape):
    class Anything(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class NoCache(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None):
            return super().forward(input_ids, attention_mask)

    model = (Anything if shape == "star" else NoCache)(tiny_model().config).eval()
    with pytest.raises(
        UnsupportedModelError, match=r"forward\(.*\) has no argument 'cache' or 'past_key_values'"
    ):
        open_engine(model, write_settings(tmp_path))
