"""Finds the condition of a generated guard that a call does not meet.

The guard's own source is the only description of its conditions. It is evaluated once more, term by term, with the arguments of
the call. Runs in workers, and in the user's program under ``MTMC_GUARD=warn``.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.guard.conditions import MODULE, Origins, loop_of, tested


@dataclass(frozen=True)
class Refusal:
    """The first condition that does not hold."""

    condition: ast.expr
    scope: Scope
    error: str = ""
    """The exception that the condition raised, as text."""

    @property
    def text(self) -> str:
        """The condition in terms of the target's parameters."""
        return self.scope.text(self.condition)


class Scope:
    """Evaluates parts of a guard, and writes them in terms of the target's parameters."""

    def __init__(self, values: Mapping[str, Any], origins: Origins) -> None:
        self._values = dict(values)
        self._origins = origins

    @property
    def tensors(self) -> list[str]:
        """The tensors of the call, in the guard's order."""
        return self._origins.tensors

    def value(self, node: ast.expr) -> Any:
        """The value of an expression. Variables that it assigns are kept."""
        self._origins.note(node)
        expression = ast.fix_missing_locations(ast.Expression(copy.deepcopy(node)))
        return eval(compile(expression, "<guard>", "eval"), self._values)

    def run(self, statement: ast.stmt) -> None:
        """Run an assignment or an import."""
        self._origins.note(statement)
        module = ast.fix_missing_locations(ast.Module([copy.deepcopy(statement)], []))
        exec(compile(module, "<guard>", "exec"), self._values)

    def with_item(self, name: str, item: Any, origin: str) -> Scope:
        """The scope with a loop's variable."""
        return Scope({**self._values, name: item}, self._origins.with_variable(name, origin))

    def text(self, node: ast.expr) -> str:
        """An expression as the user would write it."""
        return self._origins.text(node)

    def function(self, node: ast.expr) -> tuple[Callable[..., Any], dict[str, Any]] | None:
        """The Python function that a call runs, and its arguments by parameter; ``None`` for any other expression.

        Only calls without arguments, or with nothing but the user's module, test conditions of their own.
        """
        if not isinstance(node, ast.Call) or node.keywords or not isinstance(node.func, ast.Name):
            return None
        function = self._values.get(node.func.id)
        if not inspect.isfunction(function) or [ast.unparse(item) for item in node.args] not in ([], [MODULE]):
            return None
        return function, {MODULE: self._values[MODULE]} if node.args else {}


def find_refusal(guard: Callable[..., Any], arguments: Mapping[str, Any]) -> Refusal | None:
    """The first condition that a call does not meet; ``None`` if it meets all.

    Args:
        guard: a generated guard.
        arguments: the arguments of the call, by parameter of the guard.

    Raises:
        OSError: the source of the guard cannot be read.
    """
    function = inspect.unwrap(guard)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    scope = Scope({**function.__globals__, **arguments}, Origins())
    return next((refusal for refusal in _refusals(definition.body, scope)), None)


def _refusals(body: list[ast.stmt], scope: Scope) -> Iterator[Refusal]:
    for statement in body:
        condition = tested(statement)
        if condition is not None:
            yield from _unmet(condition, scope)
        elif isinstance(statement, ast.Try):
            yield from _refusals(statement.body, scope)
        elif not isinstance(statement, ast.Expr):
            scope.run(statement)


def _unmet(condition: ast.expr, scope: Scope) -> Iterator[Refusal]:
    """The conditions that do not hold, first ones first; later ones may not be evaluated before earlier ones hold."""
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
        for term in condition.values:
            yield from _unmet(term, scope)
        return
    loop = loop_of(condition)
    if loop is not None:
        body, variable, iterable = loop
        for position, item in enumerate(scope.value(iterable)):
            yield from _unmet(body, scope.with_item(variable, item, scope.tensors[position]))
        return
    try:
        if scope.value(condition):
            return
    except Exception as error:
        yield Refusal(condition, scope, f"{type(error).__name__}: {error}")
        return
    function = scope.function(condition)
    inner = find_refusal(*function) if function is not None else None
    if inner is None and isinstance(condition, ast.BoolOp):
        # All alternatives failed; the last one is the general one.
        inner = next(_unmet(condition.values[-1], scope), None)
    yield inner or Refusal(condition, scope)
