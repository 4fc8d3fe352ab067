"""Changes the code of one function while a test runs: the machinery of the mutants.

A change names its place (``module:Class.method``) and replaces one expression, or some statements that follow one
another, by others. Both are compared as syntax, so that neither their layout nor the rest of the module counts. The
function gets new code for a while; nothing on disk changes.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType


@contextmanager
def changed(place: str, old: str, new: str) -> Iterator[None]:
    """Let the function at *place* run with *new* in the place of *old*; an empty *new* leaves statements out.

    Raises ``LookupError`` when the function is not there, or *old* does not stand in it exactly once.
    """
    module_name, name = place.split(":")
    module = importlib.import_module(module_name)
    tree = ast.parse(inspect.getsource(module))
    found = _replace(_find(tree, place, name), old, new)
    if found != 1:
        raise LookupError(f"{place} has this {found} times, so that it can't be changed there: {old}")
    code = compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec")
    function = _function(module, name)
    original = function.__code__
    function.__code__ = _code_of(code, name)
    try:
        yield
    finally:
        function.__code__ = original


def _find(tree: ast.Module, place: str, name: str) -> ast.FunctionDef:
    node: ast.AST = tree
    for part in name.split("."):
        inner = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == part
        ]
        if not inner:
            raise LookupError(f"there is no {place}")
        node = inner[0]
    assert isinstance(node, ast.FunctionDef), place
    return node


def _replace(function: ast.FunctionDef, old: str, new: str) -> int:
    """Replace every *old* in *function*. How many there were."""
    wanted = ast.parse(old).body
    if len(wanted) == 1 and isinstance(wanted[0], ast.Expr) and new:
        expression = _Expression(
            wanted[0].value, ast.parse(new, mode="eval").body if _is_value(new) else None
        )
        if expression.new is not None:
            expression.visit(function)
            return expression.found
    statements = _Statements(wanted, ast.parse(new or "pass").body)
    statements.visit(function)
    return statements.found


def _is_value(text: str) -> bool:
    body = ast.parse(text).body
    return len(body) == 1 and isinstance(body[0], ast.Expr)


class _Expression(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr | None) -> None:
        self._old = ast.dump(old)
        self.new = new
        self.found = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and ast.dump(node) == self._old:
            assert self.new is not None
            self.found += 1
            return self.new
        return self.generic_visit(node)


class _Statements(ast.NodeVisitor):
    def __init__(self, old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> None:
        self._old = [ast.dump(statement) for statement in old]
        self._new = new
        self.found = 0

    def visit(self, node: ast.AST) -> None:
        self.generic_visit(node)
        for _, body in ast.iter_fields(node):
            if not isinstance(body, list) or not all(isinstance(item, ast.stmt) for item in body):
                continue
            length = len(self._old)
            for begin in range(len(body) - length, -1, -1):
                if [ast.dump(statement) for statement in body[begin : begin + length]] == self._old:
                    body[begin : begin + length] = self._new
                    self.found += 1


def _function(module: object, name: str) -> FunctionType:
    *owners, last = name.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    member = vars(owner)[last]
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    assert isinstance(function, FunctionType), name
    return function


def _code_of(code: CodeType, name: str) -> CodeType:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for constant in inner:
        if constant.co_qualname == name:
            return constant
        if name.startswith(f"{constant.co_qualname}."):
            return _code_of(constant, name)
    raise LookupError(f"no code of {name}")
