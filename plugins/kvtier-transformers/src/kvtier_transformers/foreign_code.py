"""Says which code that runs in a model is neither torch's nor transformers': nobody can tell what such code computes.

Decides by the file a function was written in, since its name can be borrowed. Reads code objects, never runs any.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PACKAGES = ("torch", "transformers", "kernels", __package__)
"""``kernels`` brings decorators of transformers' model classes, where it is installed. The last one is this package: it
sees by a hook which tokens go through a model."""
_HOMES = tuple(
    f"{Path(found.origin).parent}{os.sep}"
    for found in map(find_spec, _PACKAGES)
    if found is not None and found.origin is not None
)
_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = (f"{_LIBRARY}site-packages{os.sep}", f"{_LIBRARY}dist-packages{os.sep}")
_METHODS = frozenset(
    name for name, value in vars(torch.nn.Module).items() if isinstance(value, FunctionType)
) | {"forward"}
"""What a module has by its class, and none for itself alone."""
_ON_ALL = vars(torch.nn.modules.module)


def is_foreign(function: FunctionType) -> bool:
    """Whether *function* was written outside torch, transformers and Python itself."""
    file = function.__code__.co_filename
    return not file.startswith(_HOMES) and (not file.startswith(_LIBRARY) or file.startswith(_INSTALLED))


def is_foreign_class(cls: type) -> bool:
    """The same of a class, by the module it says it is of."""
    return _is_foreign_name(cls.__module__)


def is_foreign_module(value: object) -> bool:
    """Whether *value* is a module outside torch, transformers and Python itself."""
    return isinstance(value, ModuleType) and _is_foreign_name(value.__name__)


def _is_foreign_name(module: str) -> bool:
    package = module.partition(".")[0]
    return package not in _PACKAGES and package not in sys.stdlib_module_names


def code_objections(config: PretrainedConfig, modules: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """What was put in the place of a model's own code: hooks, methods, functions of its file and of torch.

    *modules* are the model's by name. Cost: 3 us a module, and 0.2 ms.
    """
    yield from _hooks("every module", _ON_ALL["_global_forward_pre_hooks"], _ON_ALL["_global_forward_hooks"])
    for name, module in modules.items():
        yield from _objections_to_one(name or "the model", module)
    kinds = set(map(type, modules.values()))
    for cls in {base for kind in kinds for base in kind.__mro__ if not is_foreign_class(base)}:
        yield from _replaced(f"{cls.__module__}.{cls.__qualname__}", vars(cls))
    files = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}
    for file in {*files, "torch.nn.functional"}:
        yield from _replaced(file, vars(sys.modules[file]))
    kind_of_attention = config._attn_implementation  # noqa: SLF001 - what the model itself asks for
    attention = ALL_ATTENTION_FUNCTIONS.get(kind_of_attention)
    if isinstance(attention, FunctionType) and is_foreign(attention):
        yield f"its attention {kind_of_attention!r} is code of {attention.__code__.co_filename}"


def _objections_to_one(name: str, module: torch.nn.Module) -> Iterator[str]:
    own = vars(module)
    yield from _hooks(name, own["_forward_pre_hooks"], own["_forward_hooks"])
    for attribute in own.keys() & _METHODS:
        if getattr(own[attribute], "__func__", None) is not getattr(type(module), attribute):
            yield f"{attribute} of {name} is replaced for this one module"


def _hooks(place: str, before: Mapping[int, Any], after: Mapping[int, Any]) -> Iterator[str]:
    if not before and not after:
        return
    for kind, hooks in (("pre-hook", before), ("hook", after)):
        if any(not isinstance(hook, FunctionType) or is_foreign(hook) for hook in hooks.values()):
            yield f"there is a forward {kind} on {place}, which may change what it computes: remove it"


def _replaced(owner: str, names: Mapping[str, Any]) -> Iterator[str]:
    for name, value in names.items():
        function = getattr(value, "__func__", value)  # of a static or a class method
        if isinstance(function, FunctionType) and is_foreign(function):
            yield f"{owner}.{name} is replaced by code of {function.__code__.co_filename}"
