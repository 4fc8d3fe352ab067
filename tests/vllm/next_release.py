"""Compares the interface that kvtier-vllm uses with a release of vLLM that is not installed, by its source alone.

``python -m tests.vllm.next_release --json``: downloads vLLM's newest wheel without what it requires (340 MB), or takes
``--wheel FILE``. Reads it as syntax and runs none of it. Says what is missing or differs; the status is 1 then.
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
        found = list(differences(Sources(wheel), release))
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
