"""All that a model holds in memory and its KV may depend on: tensors, packed weights, and the settings of each module.

``read_state`` walks the modules once and tells each value, or refuses it by name. ``digest_state`` makes of that what a
namespace needs; ``StateWatch`` tells cheaply whether it is still so. Knows neither files nor namespaces, and leaves
code to ``foreign_code``.
"""

import enum
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

from kvtier_core import UnsupportedModelError
from kvtier_transformers.compat import rope_settings
from kvtier_transformers.foreign_code import is_foreign, is_foreign_class, is_foreign_module
from kvtier_transformers.support import refuse

_WATCHED_ITEMS = 16
_SMALL_BYTES = 4096
"""A tensor up to this size that was written to is compared in whole: it may hold what it held before."""
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


def digest_state(state: ModelState, *, most: int | None = None) -> str:
    """Digest what is told, and each tensor's dtype, shape and items: all of them, or about *most*, evenly spread.

    Cost: 0.1 s of CPU a GiB; with *most*, some microseconds a tensor. Packed weights are unpacked one at a time. Raises
    ``UnsupportedModelError`` naming a tensor whose items torch can't show as bytes.
    """
    digest = xxhash.xxh3_128(repr(state.told).encode())
    for place, value in state.tensors.items():
        try:
            for tensor in _unpacked(value):
                digest.update(f"{place} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(_bytes(_spread(tensor.reshape(-1), most or tensor.numel())))
        except (RuntimeError, TypeError) as error:
            raise UnsupportedModelError(
                f"{place}: torch can't show what it holds, so it can't be told: {error}"
            ) from error
    return digest.hexdigest()


def _unpacked(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that *value* is, or that torch's packed weights are made of."""
    if not isinstance(value, torch.ScriptObject):
        yield value.detach()
        return
    for part in _flat(value.__getstate__()):
        if isinstance(part, torch.Tensor) and part.is_quantized:
            yield part.int_repr()
            is_by_channel = part.qscheme() in (
                torch.per_channel_affine,
                torch.per_channel_affine_float_qparams,
            )
            yield (
                part.q_per_channel_scales()
                if is_by_channel
                else torch.tensor(part.q_scale(), dtype=torch.float64)
            )
            yield part.q_per_channel_zero_points() if is_by_channel else torch.tensor(part.q_zero_point())
        elif isinstance(part, torch.Tensor):
            yield part
        else:
            yield torch.frombuffer(bytearray(f"{part!r} ".encode()), dtype=torch.uint8)


def _flat(state: Any) -> Iterator[Any]:
    if isinstance(state, list | tuple):
        for part in state:
            yield from _flat(part)
    else:
        yield state


def _spread(items: torch.Tensor, most: int) -> torch.Tensor:
    """About *most* of the items of a tensor of one dimension."""
    return items[:: max(1, len(items) // max(1, most))]


def _bytes(items: torch.Tensor) -> memoryview:
    return items.contiguous().view(torch.uint8).numpy().data


class StateWatch:
    """Tells whether a model's state is still what it was when this was made.

    It misses a change that torch does not count (through ``.data``) where that is of few items.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ``UnsupportedModelError`` as ``read_state`` does."""
        self._model = model
        self._was = read_state(model)
        self._signs = _signs(self._was.tensors)
        self._small = {
            place: bytes(_bytes(_in_memory(tensor)))
            for place, tensor in self._was.tensors.items()
            if isinstance(tensor, torch.Tensor) and tensor.nbytes <= _SMALL_BYTES
        }
        """Rotary frequencies are among them: some models write them in every forward pass, the same ones again."""
        by_dtype = defaultdict(list)
        for tensor in self._was.tensors.values():
            if isinstance(tensor, torch.Tensor):
                by_dtype[tensor.dtype].append(_spread(_in_memory(tensor), _WATCHED_ITEMS))
        self._samples = list(by_dtype.values())
        """Views of the tensors, in which a change shows: all of a dtype are read at once."""
        self._held = self._read()

    def has_changed(self) -> bool:
        """Whether it is not. Cost: 10 us a module, and 2 us a tensor. Raises as the constructor does."""
        now = read_state(self._model)
        is_same = now.told == self._was.told and self._are_signs_as_they_were(now.tensors)
        return not is_same or self._read() != self._held

    def _are_signs_as_they_were(self, tensors: Mapping[str, Any]) -> bool:
        signs = _signs(tensors)
        if signs.keys() != self._signs.keys():
            return False
        for place in [place for place, sign in signs.items() if sign != self._signs[place]]:
            is_in_place = signs[place][0] == self._signs[place][0]
            if not is_in_place or bytes(_bytes(_in_memory(tensors[place]))) != self._small.get(place):
                return False
        self._signs = signs
        return True

    def _read(self) -> list[bytes]:
        return [bytes(_bytes(torch.cat(samples))) for samples in self._samples]


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory from its first item to its last, in one dimension, whatever its strides."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.detach().as_strided((span if tensor.numel() else 0,), (1,))


def _signs(tensors: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Of each where it is, and how often torch saw it written to, if it counts that."""
    return {
        place: (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)  # noqa: SLF001 - there is no other way to ask
        if isinstance(tensor, torch.Tensor)
        else (id(tensor), 0)
        for place, tensor in tensors.items()
    }
