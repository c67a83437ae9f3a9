"""The lists to which the body of a loop appends, and whether its statements are of a form that can be kept."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from mtmc_lsp.capture.worker.loops.statements.forms import changes_only, local_lists
from mtmc_lsp.capture.worker.loops.statements.names import assigned_names, walk

LEAVING = (
    ast.Break,
    ast.Continue,
    ast.Return,
    ast.Yield,
    ast.YieldFrom,
    ast.Await,
    ast.Try,
    ast.With,
    ast.Global,
    ast.Nonlocal,
    ast.Delete,
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.While,
    ast.AsyncFor,
)
"""Statements in the body of a loop that is never kept."""
CHANGING = frozenset("append extend insert add update setdefault pop popitem remove clear sort reverse discard".split())
"""Methods that change a Python container."""


def subscripted(body: Sequence[ast.AST]) -> set[str]:
    """Names whose items are assigned: ``out`` of ``out[:, t] = x``."""
    stored = (node for node in walk(body) if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load))
    return {root.id for node in stored if isinstance(root := _root(node), ast.Name)}


def _root(node: ast.Subscript) -> ast.expr:
    """The ``out`` of ``out[i][j]``."""
    value = node.value
    while isinstance(value, ast.Subscript):
        value = value.value
    return value


def _may_be_object(call: ast.Call, lists: Collection[str]) -> TypeGuard[ast.Call]:
    """Whether the method that a call names may be one of the user's objects (``average.update(x)``): a run tells."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id not in lists and len(call.args) + len(call.keywords) > 0


def _owner(node: ast.Attribute) -> ast.expr:
    """The ``layer`` of ``layer.state.h``."""
    value = node.value
    while isinstance(value, ast.Attribute):
        value = value.value
    return value


def lists_of(loop: ast.For) -> tuple[str, ...] | None:
    """The lists to which a loop appends; ``None`` if the loop cannot be kept."""
    nodes = list(walk(loop.body))
    if loop.orelse or any(isinstance(node, LEAVING) for node in nodes):
        return None
    changed = [node for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)]
    if any(not isinstance(_owner(node), ast.Name) for node in changed):
        return None
    stored = [node for node in nodes if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)]
    if any(not isinstance(_root(node), ast.Name) for node in stored):
        return None
    local = local_lists(loop.body)
    appends = [node for node in nodes if isinstance(node, ast.Expr) and append_of(node) is not None]
    appends = [node for node in appends if not changes_only(node.value, local)]
    ends = ends_of(appends)
    lists = ends.keys()
    changing = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING
    ]
    changing = [node for node in changing if not changes_only(node, local) and not _may_be_object(node, lists)]
    last = [node for node in nodes if is_last_item(node, ends)]
    # Also in lambdas and comprehensions.
    reads = [node for root in loop.body for node in ast.walk(root) if isinstance(node, ast.Name) and node.id in lists]
    if len(changing) != len(appends) or len(reads) != len(appends) + len(last) or lists & assigned_names([loop]):
        return None
    return tuple(sorted(lists))


@dataclass(frozen=True)
class Append:
    """``outs.append(x)`` or ``outs.insert(0, x)``."""

    list: str
    value: ast.expr
    end: int
    """The index of the item afterwards."""


def append_of(statement: ast.AST) -> Append | None:
    """The statement as an append."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.keywords:
        return None
    if not isinstance(call.func.value, ast.Name):
        return None
    name = call.func.value.id
    if call.func.attr == "append" and len(call.args) == 1:
        return Append(name, call.args[0], -1)
    if call.func.attr == "insert" and len(call.args) == 2 and ast.unparse(call.args[0]) == "0":
        return Append(name, call.args[1], 0)
    return None


def ends_of(nodes: Sequence[ast.AST]) -> dict[str, int]:
    """The lists that are appended to, and the index of the item that was appended last."""
    return {item.list: item.end for node in nodes if (item := append_of(node)) is not None}


def is_last_item(node: ast.AST, ends: Mapping[str, int]) -> TypeGuard[ast.Subscript]:
    """Whether the node reads the item that was appended last: ``outs[-1]``."""
    if (
        not isinstance(node, ast.Subscript)
        or not isinstance(node.ctx, ast.Load)
        or not isinstance(node.value, ast.Name)
    ):
        return False
    name = node.value.id
    return name in ends and ast.unparse(node.slice) == str(ends[name])


class LastItems(ast.NodeTransformer):
    """Makes a variable hold the item of a list that was appended last, and reads the variable instead."""

    def __init__(self, ends: Mapping[str, int], variable: str) -> None:
        self._ends, self._variable = ends, variable

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Read the variable."""
        if not is_last_item(node, self._ends):
            return self.generic_visit(node)  # type: ignore[return-value]
        return ast.copy_location(ast.Name(self._variable, ast.Load()), node)

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        """Assign the variable before the append."""
        node.value = self.visit(node.value)
        appended = append_of(node)
        if appended is None or appended.list not in self._ends:
            return [node]
        assignment = ast.Assign([ast.Name(self._variable, ast.Store())], appended.value)
        call: Any = node.value
        call.args[-1] = ast.Name(self._variable, ast.Load())
        return [ast.fix_missing_locations(ast.copy_location(each, node)) for each in (assignment, node)]
