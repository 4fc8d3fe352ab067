"""Makes SGLang importable where it has no GPU: stands in for packages that it imports and a text model never calls.

Python runs it in every process that has this directory on its path, SGLang's own ones too. A stand-in's names are there
and fail when they are called. Nothing of kvtier is replaced, and nothing of SGLang's.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types

STAND_INS = {
    "av": "16.1.0",
    "datasets": "4.4.1",
    "decord": "0.6.0",
    "modelscope": "1.31.0",
    "timm": "1.0.25",
    "torchaudio": "2.11.0",
    "torchvision": "0.28.0",
}
"""With versions, since transformers parses some of them."""


class _Meta(type):
    def __getattr__(cls, name):
        return _name(f"{cls.__name__}.{name}")


class _Unneeded:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError(
            f"{type(self).__name__} stands in for what SGLang imports and does not need here"
        )


def _name(path):
    """What an import of *path* gives: a class, since others inherit from it."""
    return _Meta(path, (_Unneeded,), {"__module__": __name__})


class _StandIn(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{self.__name__}.{name}")


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name):
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {STAND_INS[name]}\n"

    def read_text(self, filename):
        return self._text if filename == "METADATA" else None

    def locate_file(self, path):
        return path


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        module = _StandIn(spec.name)
        module.__version__ = STAND_INS[spec.name.partition(".")[0]]
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass

    def find_distributions(self, context=None):
        name = getattr(context, "name", None)
        return [_Distribution(name)] if name in STAND_INS else []


sys.meta_path.append(_Finder())
