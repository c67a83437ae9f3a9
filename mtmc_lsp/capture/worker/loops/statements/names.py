"""The names that statements assign, in one scope."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from mtmc_lsp.capture.worker.loops.statements.forms import LOOP_VARIABLE

SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def walk(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All nodes in one scope, without the insides of lambdas and comprehensions."""
    for node in nodes:
        yield node
        if not isinstance(node, SCOPES):
            yield from walk(list(ast.iter_child_nodes(node)))


def assigned_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that are assigned in this scope, walrus expressions in comprehensions included."""
    walked = list(walk(nodes))
    # The variables of a rewritten inner loop are those that its own statements assign.
    generated = {id(item) for node in walked if _is_generated(node) for item in ast.walk(node)}
    names = {
        node.id
        for node in walked
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and id(node) not in generated
    }
    walrus = (node for root in nodes for node in ast.walk(root) if isinstance(node, ast.NamedExpr))
    return names | {node.target.id for node in walrus}


def _is_generated(node: ast.AST) -> bool:
    """Whether a statement passes variables into or out of a rewritten loop."""
    value = node.value if isinstance(node, ast.Assign) else None
    function = value.func if isinstance(value, ast.Call) else None
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return False
    return function.value.id.startswith(LOOP_VARIABLE) and function.attr in ("enter", "results")
