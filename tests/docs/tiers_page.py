"""Makes docs/reference/tiers.md from the code: every hook, method and value of the tier interface, as it is written."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

from kvtier_core import blocktier, hookspecs, tier, values
from kvtier_core.blocktier import BlockTier
from kvtier_core.hookspecs import REQUIRED_HOOKS, TierHookSpecs
from kvtier_core.values import (
    BlockInfo,
    JobResult,
    OffloadPolicy,
    PoolView,
    RequestInfo,
    TierContext,
    TierInfo,
    TierJob,
)

HEAD = Path(__file__).with_name("tiers_head.md")
"""What is written by hand."""
_OPTIONAL = [name for name in tier.__all__ if name.startswith("Supports")]
_VALUES = (TierInfo, TierContext, PoolView, RequestInfo, TierJob, JobResult, BlockInfo, OffloadPolicy)


def make_page() -> str:
    """The whole page."""
    lines = [HEAD.read_text(), "## The hook specs", "", *_said(hookspecs), *_members(TierHookSpecs)]
    lines += ["## The blocking interface", "", *_said(blocktier), "### `BlockTier`", ""]
    lines += [*_said(BlockTier), *_members(BlockTier), "### What you may add", ""]
    for protocol in (getattr(blocktier, name) for name in _OPTIONAL):
        lines += [f"#### `{protocol.__name__}`", "", *_said(protocol), *_members(protocol)]
    lines += ["## The values", "", *_said(values)]
    for cls in _VALUES:
        lines += [f"### `{cls.__name__}`", "", *_said(cls), *_members(cls)]
    return "\n".join(lines).rstrip() + "\n"


def _said(of: object) -> list[str]:
    """A docstring as Markdown."""
    return [_markdown(inspect.getdoc(of) or ""), ""]


def _markdown(docstring: str) -> str:
    return docstring.replace("``", "`")


def _members(cls: type) -> Iterator[str]:
    """Every public method and field that is written in *cls*, in the order of the code, with what is said of it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for member, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            yield from (_signature(cls, member), "", _markdown(ast.get_docstring(member) or ""), "")
        elif isinstance(member, ast.AnnAssign | ast.Assign) and (field := _field(member)):
            yield from (field, "", *_below(following))


def _signature(cls: type, function: ast.FunctionDef) -> str:
    is_property = any(
        isinstance(mark, ast.Name) and mark.id == "property" for mark in function.decorator_list
    )
    arguments = ast.unparse(function.args).split(", ", 1)[1:]
    called = function.name if is_property else f"{function.name}({''.join(arguments)})"
    required = cls is TierHookSpecs and function.name in REQUIRED_HOOKS
    returns = ast.unparse(function.returns).strip("'") if function.returns else "None"
    return f"**`{called}`** returns `{returns}`{' (required)' if required else ''}"


def _field(member: ast.AnnAssign | ast.Assign) -> str | None:
    target = member.target if isinstance(member, ast.AnnAssign) else member.targets[0]
    if ast.unparse(target).startswith("_"):
        return None
    if isinstance(member, ast.Assign):
        return f"**`{ast.unparse(member)}`**"
    default = (
        ""
        if member.value is None or isinstance(member.value, ast.Call)
        else f" = {ast.unparse(member.value)}"
    )
    return f"**`{ast.unparse(target)}: {ast.unparse(member.annotation)}{default}`**"


def _below(following: ast.stmt | None) -> list[str]:
    """What the text below a field says of it."""
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return [_markdown(inspect.cleandoc(str(following.value.value))), ""]
    return []
