"""Compares the interface that kvtier-vllm uses with a release of vLLM that is not installed, by its source alone.

``python -m tests.vllm.next_release --json``: downloads vLLM's newest wheel without what it requires (340 MB), or takes
``--wheel FILE``. Reads it as syntax and runs none of it. Says what is missing or differs, and what the release's base
classes have that nobody here has looked at; the status is 1 then.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kvtier_vllm import compat

_BASE, _TIERING = "vllm.v1.kv_offload.base", "vllm.v1.kv_offload.tiering.base"
_SUBCLASSES = {
    f"{_BASE}:OffloadingManager": "kvtier_vllm.manager:KvtierManager",
    f"{_BASE}:OffloadingWorker": "kvtier_vllm.worker:KvtierWorker",
    f"{_BASE}:OffloadingSpec": "kvtier_vllm.spec:KvtierSpec",
    f"{_TIERING}:SecondaryTierManager": "kvtier_vllm.bridge:KvtierTier",
}
"""vLLM's classes that kvtier-vllm derives from, and what it derives."""
_LEFT_TO_VLLM = {
    f"{_BASE}:OffloadingManager.touch": "the coordinator sees each use in its lookups",
    f"{_BASE}:OffloadingManager.lock": "0.33: a no-op, and the manager is entered by the scheduler's thread alone",
    f"{_BASE}:OffloadingManager.on_reset_flushed": "0.33: the pool's control page says when copies are over",
    f"{_BASE}:OffloadingManager.config_info": "0.33: labels of a metric, none by default",
    f"{_BASE}:OffloadingSpec.config_info_keys": "0.33: the names of these labels",
    f"{_TIERING}:SecondaryTierManager.block_size_bytes": "read as vLLM sets it",
    f"{_TIERING}:SecondaryTierManager.cache_hit_source": "follows from the medium",
    f"{_TIERING}:SecondaryTierManager.__init_subclass__": "sets the hit source",
    f"{_TIERING}:SecondaryTierManager.bp_detector": "vLLM's own, which __init__ is given",
    f"{_TIERING}:SecondaryTierManager.has_pending_work": "tiers go on by themselves",
    f"{_TIERING}:SecondaryTierManager.take_events": "vLLM's tiering tells its own",
    f"{_TIERING}:SecondaryTierManager.touch": "lookups tell of each use",
    f"{_TIERING}:SecondaryTierManager.serve_external_requests": "there are none",
    f"{_TIERING}:SecondaryTierManager.build_metric_definitions": "none of its own",
    f"{_TIERING}:SecondaryTierManager.get_stats": "none of its own",
    f"{_TIERING}:SecondaryTierManager.tolerates_off_thread_polling": "0.33: False, so that one thread calls it",
    f"{_TIERING}:SecondaryTierManager.config_info_keys": "0.33: labels of a metric, none by default",
    f"{_TIERING}:SecondaryTierManager.config_info": "0.33: their values",
}
"""Members that a base class has and kvtier-vllm leaves alone: why its default is right."""


class Sources:
    """The modules of a wheel, or below a directory, as syntax."""

    def __init__(self, place: Path) -> None:
        self._root = place if place.is_dir() else zipfile.Path(place)
        self.module = cache(self._module)

    def _module(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        for file in (self._root / f"{path}.py", self._root / f"{path}/__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, name: str) -> tuple[ast.AST, str] | None:
        """What ``module:path`` names, and the module that has it; follows imports and base classes."""
        module, _, path = name.partition(":")
        first, *rest = path.split(".")
        found = self._in_module(module, first)
        for part in rest:
            if found is None:
                return None
            found = self._in_class(*found, part)
        return found

    def _in_module(self, module: str, name: str) -> tuple[ast.AST, str] | None:
        tree = self.module(module)
        if tree is None:
            return None
        for node in _statements(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return node, module
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._in_module(node.module, alias.name)
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return node, module
        return None

    def _in_class(self, owner: ast.AST, module: str, name: str) -> tuple[ast.AST, str] | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        for cls, place in self._with_bases(owner, module):
            for node in cls.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                    return node, place
                if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                    return node, place
        if name == "__init__":  # a dataclass
            return owner, module
        return None

    def _with_bases(self, owner: ast.ClassDef, module: str) -> Iterator[tuple[ast.ClassDef, str]]:
        yield owner, module
        for base in owner.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(inner, ast.Name):
                found = self._in_module(module, inner.id)
                if found is not None and isinstance(found[0], ast.ClassDef):
                    yield from self._with_bases(found[0], found[1])

    def members(self, owner: ast.ClassDef, module: str) -> set[str]:
        """Every name that a class or its objects have, by its own body, its bases, and what its methods set."""
        names: set[str] = set()
        for cls, _ in self._with_bases(owner, module):
            for node in ast.walk(cls):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(node.name)
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    names |= _targets(node)
        return names

    def declared(self, owner: ast.ClassDef, module: str) -> dict[str, bool]:
        """What stands in a class's body, and its bases', and whether it is an abstract method."""
        found: dict[str, bool] = {}
        for cls, _ in self._with_bases(owner, module):
            for node in cls.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    marks = map(ast.unparse, node.decorator_list)
                    found.setdefault(node.name, any(mark.endswith("abstractmethod") for mark in marks))
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    found |= dict.fromkeys(_targets(node) - found.keys(), False)
        return found

    def parameters(self, node: ast.AST, module: str) -> list[str]:
        """The parameters' names of a function, or of a dataclass."""
        if isinstance(node, ast.ClassDef):
            fields = [
                target
                for cls, _ in reversed(list(self._with_bases(node, module)))
                for part in cls.body
                if isinstance(part, ast.AnnAssign)
                for target in _targets(part)
            ]
            return ["self", *dict.fromkeys(fields)]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        given = node.args
        names = [part.arg for part in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        if any(isinstance(part, ast.Name) and part.id == "classmethod" for part in node.decorator_list):
            names = names[1:]
        return names


def _statements(block: ast.Module | ast.If | ast.Try) -> Iterator[ast.stmt]:
    """A module's own statements, those under a condition among them."""
    for node in block.body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node)


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for target in targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name | ast.Attribute)
    }


def differences(sources: Sources, release: str) -> Iterator[str]:
    """What *release*, such as 0.33, has otherwise than kvtier-vllm expects, a line each."""
    for name, expected in compat.signatures(release).items():
        found = sources.find(name)
        if found is None:
            yield f"{name} is missing"
        elif (takes := ", ".join(sources.parameters(*found))) != expected:
            yield f"{name} takes ({takes}) and not ({expected})"
    for name, expected in compat._NAMES.items():
        found = sources.find(name)
        if found is None:
            yield f"{name} is missing"
        elif isinstance(found[0], ast.ClassDef):
            lacking = {item for item in expected.split(", ") if item} - sources.members(found[0], found[1])
            if lacking:
                yield f"{name} has no {', '.join(sorted(lacking))}"


def unknown_members(sources: Sources) -> Iterator[str]:
    """What the base classes have, and kvtier-vllm neither defines nor knowingly leaves to them, a line each."""
    ours = Sources(Path(compat.__file__).parents[1])
    for base, derived in _SUBCLASSES.items():
        defined = ours.declared(*_class(ours, derived))
        for member, is_abstract in sources.declared(*_class(sources, base)).items():
            if member not in defined and is_abstract:
                yield f"{base}.{member} is abstract, and {derived} does not define it"
            elif member not in defined and f"{base}.{member}" not in _LEFT_TO_VLLM:
                yield f"{base}.{member} is new: define it in {derived}, or say why its default is right"


def _class(sources: Sources, name: str) -> tuple[ast.ClassDef, str]:
    found = sources.find(name)
    assert found is not None, name
    assert isinstance(found[0], ast.ClassDef), name
    return found[0], found[1]


def download(directory: Path) -> Path:
    """The newest wheel of vLLM, without what it requires."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(directory),
        "vllm",
    ]
    subprocess.run(command, check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def main(arguments: list[str] | None = None) -> int:
    """Download, compare, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.next_release", description=__doc__)
    parser.add_argument("--wheel", type=Path, help="this one, instead of the newest")
    parser.add_argument("--json", action="store_true", help="print one JSON object, alone on the last line")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kvtier-vllm-next-") as directory:
        wheel = given.wheel or download(Path(directory))
        version = wheel.name.split("-")[1]
        release = ".".join(version.split(".")[:2])
        sources = Sources(wheel)
        found = list(differences(sources, release)) or list(unknown_members(sources))
    report = {
        "vllm": version,
        "supported": release in compat.SUPPORTED,
        "checked": len(compat._SIGNATURES) + len(compat._NAMES),
        "differences": found,
    }
    text = (
        json.dumps(report) if given.json else "\n".join(f"{name}: {value}" for name, value in report.items())
    )
    sys.stdout.write(f"{text}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
