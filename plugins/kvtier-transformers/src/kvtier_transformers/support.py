"""Says what speaks against keeping a model's KV before it has run: by its configuration, its state and its code.

Decides nothing by a model's name. What its layers keep is found out by ``layers``, from a run.
"""

from collections.abc import Collection, Iterator

import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvtier_core import UnsupportedModelError
from kvtier_core.transfer import has_device
from kvtier_transformers.compat import cache_keyword, rope_settings
from kvtier_transformers.foreign_code import code_objections

_STATE_LAYERS = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "hybrid_sliding", "hybrid_mamba"}
)
"""Kinds of layers, in transformers' words, that keep a state instead of K and V. The run finds the others."""
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def _config_objections(config: PretrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "it has cross-attention layers"
    if getattr(config, "use_bidirectional_attention", None):
        yield "its tokens attend to later ones (use_bidirectional_attention)"
    for kind in sorted({*(getattr(config, "layer_types", None) or ())} & _STATE_LAYERS):
        yield f"it has {kind} layers"


def check_length(config: PretrainedConfig, max_tokens: int) -> None:
    """Raise ``UnsupportedModelError`` when sequences of *max_tokens* tokens have rotary positions that change.

    Some scaled positions change when a sequence becomes longer than the model was trained for: the KV of a prefix
    depends on the length of the whole then. Shorter sequences are served.
    """
    settings = rope_settings(config)
    by_kind = [part for part in settings.values() if isinstance(part, dict)]
    for part in by_kind or [settings]:
        kind = part.get("rope_type")
        if kind not in _LENGTH_DEPENDENT_ROPE:
            continue
        limit = part.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if limit is None and kind == "dynamic":
            limit = config.max_position_embeddings
        if limit is None or max_tokens > limit:
            objection = (
                f"its {kind!r} rotary positions change in sequences of more than {limit or 'an unknown number of'} "
                f"tokens, and the engine is opened for {max_tokens}: open it with a max_tokens of at most that"
            )
            raise refuse(f"a model of type {config.model_type!r}", [objection])


def _state_objections(model: PreTrainedModel, modules: Collection[torch.nn.Module]) -> Iterator[str]:
    if getattr(model, "_hf_peft_config_loaded", False) or any(map(_is_adapter, modules)):
        yield "it has an adapter loaded, which its weight files do not show: merge the adapter into the weights"
    if model.training:
        yield "it is in training mode: call model.eval()"
    yield from device_objections({parameter.device for parameter in model.parameters()})
    if not model.dtype.is_floating_point:
        yield f"its KV dtype {model.dtype} is not a floating-point one"


def device_objections(devices: Collection[torch.device]) -> Iterator[str]:
    """Objections to a model whose weights are on these *devices*."""
    names = " and ".join(sorted(map(str, devices)))
    if len(devices) > 1:
        yield f"it is on {names}: load all of it onto one device"
    if not all(map(has_device, devices)):
        yield f"it is on {names}, and kvtier copies from accelerators with streams in torch: call model.to('cpu')"


def _is_adapter(module: torch.nn.Module) -> bool:
    """Whether PEFT, which puts its layers into the model it is given, made this one."""
    return type(module).__module__.partition(".")[0] == "peft"


def refuse(name: str, objections: list[str]) -> UnsupportedModelError:
    """The error for a model of this name, with every reason."""
    return UnsupportedModelError(
        f"{name} is not supported: {'; '.join(objections)}. Supported: decoders whose layers have full, "
        "sliding-window or chunked attention, on one device"
    )


def check_config(config: PretrainedConfig) -> None:
    """Raise ``UnsupportedModelError``, with every reason, when no model of this configuration can be kept."""
    objections = list(_config_objections(config))
    if objections:
        raise refuse(f"a model of type {config.model_type!r}", objections)


def check_model(model: torch.nn.Module) -> PreTrainedModel:
    """Return *model* when nothing speaks against keeping its KV. ``Engine.open`` then runs it on a few tokens.

    Raises ``UnsupportedModelError`` with every reason against it: layers that keep a state, cross-attention, an
    adapter, several devices, one that kvtier can't copy from, hooks and other code in the place of its own. Cost: 10 us
    a module.
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


def check_generates(model: PreTrainedModel) -> None:
    """Raise ``UnsupportedModelError`` when *model* has no head that says the next token."""
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{type(model).__name__} does not generate: load it with AutoModelForCausalLM, or run it yourself with "
            "cache_for"
        )
