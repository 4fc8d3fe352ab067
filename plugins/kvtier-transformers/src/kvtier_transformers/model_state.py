"""All that a model holds in memory and its KV may depend on: tensors, packed weights, and the settings of each module.

``read_state`` walks the modules once and tells each value, or refuses it by name. Knows neither files nor namespaces,
reads no tensor's items (``state_bytes`` does), and leaves code to ``foreign_code``.
"""

import enum
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import getclosurevars
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

from kvtier_transformers.compat import rope_settings
from kvtier_transformers.foreign_code import is_foreign, is_foreign_class, is_foreign_module
from kvtier_transformers.support import refuse

_CONTAINERS = (dict, list, tuple, set, frozenset)
_MOST_ITEMS = 1000
"""Of a container that foreign code reads by name: a larger one counts as itself, so that a look stays cheap."""
_NO_MATTER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Parts of a configuration that can't change the KV of the same weights, or that a namespace says by itself. All others
count: they can be overridden when a model is loaded, and a later release has more of them."""
_OF_TORCH = frozenset(vars(torch.nn.Module())) | {"forward", "_is_hf_initialized", "_is_buffer", "persistent"}
"""What every module has, or every tensor: told by itself, without a say in what is computed, or, as ``forward``, of the
module's class where ``check_model`` has passed the model."""
_OF_A_MODEL = _OF_TORCH.union(
    (
        *("name_or_path", "generation_config", "warnings_issued", "loss_type", "_loss_function"),
        *(
            "_tp_plan",
            "_ep_plan",
            "_pp_plan",
            "_fsdp_plan",
            "_tp_size",
            "hf_device_map",
            "all_tied_weights_keys",
        ),
        *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules"),
        *(
            "_skip_keys_device_placement",
            "_keys_to_ignore_on_load_unexpected",
            "_keys_to_ignore_on_load_missing",
        ),
        *(
            "_keys_to_ignore_on_save",
            "_output_capturing_hooks_installed",
            "_compiled_call",
            "_hf_peft_config_loaded",
            "_weight_conversions",
        ),
        *("gradient_checkpointing", "_gradient_checkpointing_func", "hf_quantizer", "_compile_config"),
    )
)
"""What transformers keeps on a model for loading, training, generating and compiling it."""
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), enum.Enum, PurePath, np.generic),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def config_digest(config: PretrainedConfig) -> str:
    """Of every setting that the KV may depend on, and of the attention function that is chosen."""
    settings = {name: value for name, value in config.to_dict().items() if name not in _NO_MATTER}
    settings["rope"] = rope_settings(config)
    settings["attention"] = getattr(config, "_attn_implementation", None)
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(kw_only=True)
class ModelState:
    """What was read of one model."""

    told: tuple[Any, ...] = ()
    """Every value that is no tensor, and where it is, in words and nested tuples: equal for equal models."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """Tensors and torch's packed weights, by where they are."""
    foreign: list[str] = field(default_factory=list)
    """Where there is code that is neither torch's nor transformers', such as ``model.norm (mine.Norm)``."""


def read_state(model: PreTrainedModel) -> ModelState:
    """Tell everything in *model*. Cost: 10 us a module; reads no tensor's items.

    Raises ``UnsupportedModelError`` naming what can't be told: a sparse tensor, an iterator, an object of C code.
    """
    reader = _Reader()
    precision = torch.get_float32_matmul_precision()
    reader.state.told = (precision, reader.tell(model, ""))
    if reader.unreadable:
        raise refuse(
            type(model).__name__,
            [f"{what} can't be read, and its KV may depend on it: remove it" for what in reader.unreadable],
        )
    return reader.state


class _Reader:
    """One walk. Whatever was met before is told by where that was."""

    def __init__(self) -> None:
        self.state = ModelState()
        self.unreadable: list[str] = []
        self._met: dict[int, tuple[str, object]] = {}
        """By its address, which nothing else gets while it is held here."""
        self._by_class: dict[type, Callable[[Any, str], Any]] = {}
        self._by_kind: tuple[tuple[Any, Callable[[Any, str], Any]], ...] = (
            (_VALUES, self._value),
            (torch.nn.Module, self._module),
            ((torch.Tensor, torch.ScriptObject), self._tensor),
            (np.ndarray, self._array),
            (PretrainedConfig, self._config),
            (type, self._class),
            (dict, self._dict),
            ((list, tuple), self._list),
            ((set, frozenset), self._set),
            ((FunctionType, BuiltinFunctionType), self._function),
            (MethodType, self._method),
            (partial, self._partial),
            (object, self._object),
        )

    def tell(self, value: object, place: str) -> Any:
        """*value*, found at *place*, in words."""
        cls = type(value)
        tell = self._by_class.get(cls)
        if tell is None:
            tell = next(tell for kind, tell in self._by_kind if issubclass(cls, kind))
            self._by_class[cls] = tell
        if tell != self._value:
            if id(value) in self._met:
                return f"same as {self._met[id(value)][0]}"
            self._met[id(value)] = (place, value)
        return tell(value, place)

    def _value(self, value: object, _place: str) -> str:
        return f"{type(value).__name__} {value!r}"

    def _parts(self, parts: Iterable[tuple[str, Any]], place: str) -> list[tuple[str, Any]]:
        prefix = f"{place}." if place else ""
        return [(name, self.tell(value, f"{prefix}{name}")) for name, value in parts]

    def _module(self, module: torch.nn.Module, place: str) -> Any:
        own = vars(module)
        passed_over = _OF_A_MODEL if isinstance(module, PreTrainedModel) else _OF_TORCH
        parts = [(name, own[name]) for name in sorted(own.keys() - passed_over)]
        for kind in ("_parameters", "_buffers", "_modules"):
            parts += own[kind].items()
        return (self._class(type(module), place), module.training, *self._parts(parts, place))

    def _tensor(self, value: Any, place: str) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.ScriptObject):
            return self._wrapped(value, place)
        if isinstance(value, torch.Tensor) and (
            value.layout is not torch.strided or value.is_meta or value.is_quantized
        ):
            return self._unreadable(value, place)
        self.state.tensors[place] = value
        own = getattr(value, "__dict__", {})
        return ("tensor", *self._parts(((name, own[name]) for name in sorted(own.keys() - _OF_TORCH)), place))

    def _wrapped(self, value: torch.Tensor, place: str) -> Any:
        """A tensor of a class that wraps others, as quantized ones are, by torch's protocol for that."""
        if not hasattr(value, "__tensor_flatten__"):
            return self._unreadable(value, place)
        names, context = value.__tensor_flatten__()
        parts = [*((name, getattr(value, name)) for name in names), ("context", context)]
        return (self._class(type(value), place), *self._parts(parts, place))

    def _array(self, value: NDArray[Any], place: str) -> Any:
        if value.dtype.hasobject:
            return self._unreadable(value, place)
        items = xxhash.xxh3_128(value.tobytes()).hexdigest()
        return f"array {value.dtype} {value.shape} {items}"

    def _config(self, value: PretrainedConfig, place: str) -> Any:
        return (self._class(type(value), place), config_digest(value))

    def _dict(self, value: Mapping[Any, Any], place: str) -> Any:
        items = [(self.tell(key, place), self.tell(item, f"{place}[{key!r}]")) for key, item in value.items()]
        return (self._class(type(value), place), *items)

    def _list(self, value: Sequence[Any], place: str) -> Any:
        items = [self.tell(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return (self._class(type(value), place), *items)

    def _set(self, value: Collection[Any], place: str) -> Any:
        return (self._class(type(value), place), *sorted(repr(self.tell(item, place)) for item in value))

    def _function(self, value: FunctionType | BuiltinFunctionType, place: str) -> Any:
        name = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, BuiltinFunctionType):
            return name
        if is_foreign(value):
            self.state.foreign.append(f"{place} ({name})")
            return (f"{name} {id(value)}", *self._read_by(value, place))
        return (name, *self._parts(getclosurevars(value).nonlocals.items(), place))

    def _read_by(self, function: FunctionType, place: str) -> list[tuple[str, Any]]:
        """Tell what foreign code reads by name: in its closure, in its module, and in other foreign modules."""
        read = getclosurevars(function)
        found = {**read.nonlocals, **read.globals}
        for module in [value for value in found.values() if is_foreign_module(value)]:
            named = read.unbound & vars(module).keys()
            found |= {f"{module.__name__}.{name}": vars(module)[name] for name in named}
        return [(name, self._found(value, f"{place}: {name}")) for name, value in sorted(found.items())]

    def _found(self, value: object, place: str) -> Any:
        """Tell something that foreign code can read. What is of no known kind counts as itself, whatever it holds."""
        if isinstance(value, (*_VALUES, torch.nn.Module, torch.Tensor, np.ndarray)):
            return self.tell(value, place)
        value = getattr(value, "__func__", value)  # of a static or a class method
        if id(value) in self._met:
            return id(value)
        if isinstance(value, FunctionType) and is_foreign(value):
            self._met[id(value)] = (place, value)
            return (id(value), *self._read_by(value, place))
        if isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS:
            self._met[id(value)] = (place, value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return [(repr(name), self._found(item, f"{place}[{name!r}]")) for name, item in items]
        return id(value)

    def _method(self, value: MethodType, place: str) -> Any:
        return ("method", *self._parts([("func", value.__func__), ("self", value.__self__)], place))

    def _partial(self, value: "partial[Any]", place: str) -> Any:
        parts = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
        return ("partial", *self._parts(parts, place))

    def _object(self, value: object, place: str) -> Any:
        slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
        if not slots and not hasattr(value, "__dict__"):
            return self._unreadable(value, place)
        own = {name: getattr(value, name) for name in slots} | dict(getattr(value, "__dict__", {}))
        return (self._class(type(value), place), *self._parts(sorted(own.items()), place))

    def _class(self, cls: type, place: str) -> Any:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if not is_foreign_class(cls):
            return name
        self.state.foreign.append(f"{place} ({name})")
        if id(cls) in self._met:
            return f"{name} {id(cls)}"
        self._met[id(cls)] = (name, cls)
        parts: list[tuple[str, Any]] = [
            (key, self._found(item, f"{name}.{key}"))
            for base in cls.__mro__
            if is_foreign_class(base)
            for key, item in vars(base).items()
            if key not in ("__dict__", "__weakref__", "__annotations__")
        ]
        return (name, *parts)

    def _unreadable(self, value: object, place: str) -> str:
        self.unreadable.append(f"{place} ({type(value).__module__}.{type(value).__qualname__})")
        return "unreadable"


def _slots(cls: type) -> tuple[str, ...]:
    slots = getattr(cls, "__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
