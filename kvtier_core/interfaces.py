"""Compares an engine's interface with the one that its adapter was made for (C57), by signatures and names."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def find_differences(signatures: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """What is otherwise in the engine that is installed, each in a few words; none where nothing is.

    Keys are ``module:path``. *signatures* has the parameters of what is called or overridden, *names* what is read of
    an object: fields, members and attributes. Cost: imports the modules.
    """
    found = [
        *(_difference(name, expected) for name, expected in signatures.items()),
        *(_lack(name, expected) for name, expected in names.items()),
    ]
    return [text for text in found if text is not None]


def _difference(name: str, expected: str) -> str | None:
    try:
        found = ", ".join(inspect.signature(_resolve(name)).parameters)
    except (ImportError, AttributeError) as error:
        return f"{name} is missing ({error})"
    return None if found == expected else f"{_path(name)} takes ({found}) and not ({expected})"


def _lack(name: str, expected: str) -> str | None:
    try:
        target = _resolve(name)
    except (ImportError, AttributeError) as error:
        return f"{name} is missing ({error})"
    found = {
        *dir(target),
        *getattr(target, "__annotations__", ()),
        *getattr(target, "__dataclass_fields__", ()),
    }
    lacking = [item for item in expected.split(", ") if item and item not in found]
    return f"{_path(name)} has no {', '.join(lacking)}" if lacking else None


def _path(name: str) -> str:
    return name.partition(":")[2]


def _resolve(name: str) -> Any:  # noqa: ANN401 - whatever the engine has there
    """The object ``module:path``. Raises ``ImportError`` or ``AttributeError``."""
    target: object = import_module(name.partition(":")[0])
    for part in _path(name).split("."):
        target = getattr(target, part)
    return target
