"""Says whether a model's KV is what kvtier can keep: one K and one V per token and layer, fixed once computed.

Decides by what the configuration says, and vouches only for model types this package is tested with. A model whose
KV of a prefix depends on what follows it (scaled positions that change with the length) would be answered wrongly
from a cache, so it is refused like one whose layers keep something else.
"""

from collections.abc import Collection, Iterator

import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvtier_core import UnsupportedModelError
from kvtier_transformers.compat import cache_keyword, rope_settings
from kvtier_transformers.foreign_code import code_objections

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def layer_types(config: PretrainedConfig) -> tuple[str, ...]:
    """The kind of each layer, in transformers' own words, inferred where the configuration does not list them."""
    listed = getattr(config, "layer_types", None)
    if listed is not None:
        return tuple(listed)
    if getattr(config, "sliding_window", None) is not None:
        kind = "sliding_attention"
    elif getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    else:
        kind = "full_attention"
    return (kind,) * int(getattr(config, "num_hidden_layers", 1))


def _config_objections(config: PretrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "it has cross-attention layers"
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        yield f"its type {config.model_type!r} is not one of {', '.join(SUPPORTED_MODEL_TYPES)}"
    for kind in sorted({*layer_types(config)} - {"full_attention"}):
        yield f"it has {kind} layers"
    for rope_type in sorted(_rope_types(config) & {*_LENGTH_DEPENDENT_ROPE}):
        yield f"its {rope_type!r} rotary positions make a prefix's KV depend on the prompt's length"


def _rope_types(config: PretrainedConfig) -> set[str]:
    """That of the model, or one for each kind of layers."""
    settings = rope_settings(config)
    by_kind = [part for part in settings.values() if isinstance(part, dict)]
    return {str(part.get("rope_type", "default")) for part in (by_kind or [settings])}


def _state_objections(model: PreTrainedModel, modules: Collection[torch.nn.Module]) -> Iterator[str]:
    if getattr(model, "_hf_peft_config_loaded", False) or any(map(_is_adapter, modules)):
        yield "it has an adapter loaded, which its weight files do not show: merge the adapter into the weights"
    # set when the model was made: its configuration may have been changed since
    if any(vars(module).get("sliding_window") is not None for module in modules):
        yield "it has sliding_attention layers, whatever its configuration says now"
    if model.training:
        yield "it is in training mode: call model.eval()"
    elsewhere = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if elsewhere:
        yield f"it is on {', '.join(sorted(elsewhere))}: call model.to('cpu')"
    if not model.dtype.is_floating_point:
        yield f"its KV dtype {model.dtype} is not a floating-point one"


def _is_adapter(module: torch.nn.Module) -> bool:
    """Whether PEFT, which puts its layers into the model it is given, made this one."""
    return type(module).__module__.partition(".")[0] == "peft"


def refuse(name: str, objections: list[str]) -> UnsupportedModelError:
    """The error for a model of this name, with every reason."""
    return UnsupportedModelError(
        f"{name} is not supported: {'; '.join(objections)}. Supported: models of type "
        f"{', '.join(SUPPORTED_MODEL_TYPES)} with full_attention layers only, on the CPU"
    )


def check_config(config: PretrainedConfig) -> None:
    """Raise ``UnsupportedModelError``, with every reason, when no model of this configuration can be kept."""
    objections = list(_config_objections(config))
    if objections:
        raise refuse(f"a model of type {config.model_type!r}", objections)


def check_model(model: torch.nn.Module) -> PreTrainedModel:
    """Return *model* when kvtier can keep its KV.

    Raises ``UnsupportedModelError`` with every reason against it: sliding-window, chunked, linear-attention or Mamba
    layers, cross-attention, a model type not vouched for, an adapter, another device than the CPU, hooks and other code
    in the place of its own. Cost: 10 us a module.
    """
    if not isinstance(model, PreTrainedModel):
        raise refuse(type(model).__name__, ["it is not a transformers model"])
    modules = dict(model.named_modules())
    objections = [
        *_config_objections(model.config),
        *_state_objections(model, modules.values()),
        *code_objections(model.config, modules),
    ]
    if objections:
        raise refuse(type(model).__name__, objections)
    cache_keyword(model)
    return model
