"""What a setting means, in the words of the docstring below its field. For tools: reads source files, nothing else."""

import ast
import inspect
import textwrap

from pydantic import BaseModel


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of *model* and its bases; no entry where there is none, or no source to read."""
    docs: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            docs |= _docs_in(cls)
    return {name: text for name, text in docs.items() if name in model.model_fields}


def _docs_in(cls: type[BaseModel]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef), source
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
