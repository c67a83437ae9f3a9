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

STORES = ("_modules", "_parameters", "_buffers")
"""Dictionaries of a module that a guard reads instead of attributes."""
TENSORS = "tensors"
"""The guard's variable for all tensors of the call."""


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

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._origins: dict[str, ast.expr] = {}
        self.tensors: list[str] = []
        """The tensors of the call, in the guard's order."""

    def value(self, node: ast.expr) -> Any:
        """The value of an expression. Variables that it assigns are kept."""
        self._note_origins(node)
        expression = ast.fix_missing_locations(ast.Expression(copy.deepcopy(node)))
        return eval(compile(expression, "<guard>", "eval"), self._values)

    def run(self, statement: ast.stmt) -> None:
        """Run an assignment or an import."""
        self._note_origins(statement)
        if isinstance(statement, ast.Assign):
            self._note_assignment(statement.targets[0], statement.value)
        module = ast.fix_missing_locations(ast.Module([copy.deepcopy(statement)], []))
        exec(compile(module, "<guard>", "exec"), self._values)

    def with_item(self, name: str, item: Any, origin: str) -> Scope:
        """The scope with a loop's variable."""
        inner = Scope({**self._values, name: item})
        inner._origins = {**self._origins, name: ast.parse(origin, mode="eval").body}
        inner.tensors = self.tensors
        return inner

    def text(self, node: ast.expr) -> str:
        """An expression in terms of the target's parameters, as the user would write it."""
        return ast.unparse(_Readable(self._origins).visit(copy.deepcopy(node)))

    def function(self, node: ast.expr) -> Callable[..., Any] | None:
        """The Python function that a call without arguments runs; ``None`` for any other expression."""
        if not isinstance(node, ast.Call) or node.args or node.keywords or not isinstance(node.func, ast.Name):
            return None
        function = self._values.get(node.func.id)
        return function if inspect.isfunction(function) else None

    def _note_assignment(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and target.id == TENSORS and isinstance(value, ast.Tuple):
            self.tensors = [self.text(item) for item in value.elts]
        elif isinstance(target, ast.Name):
            self._origins[target.id] = _Readable(self._origins).visit(copy.deepcopy(value))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for name, item in zip(target.elts, value.elts, strict=True):
                self._note_assignment(name, item)

    def _note_origins(self, node: ast.AST) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                self._origins[inner.target.id] = _Readable(self._origins).visit(copy.deepcopy(inner.value))


class _Readable(ast.NodeTransformer):
    """Replaces local variables by what they hold, and fast accesses by attributes."""

    def __init__(self, origins: Mapping[str, ast.expr]) -> None:
        self._origins = origins

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._origins.get(node.id, node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        return self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        name = next((item.value for item in node.args if isinstance(item, ast.Constant)), None)
        is_store = isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        if is_store and isinstance(name, str):
            store = node.func.value  # type: ignore[attr-defined]
            if isinstance(store, ast.Attribute) and store.attr in STORES:
                return _member(store.value, name)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and isinstance(name, str):
            return _member(node.args[0], name)
        # A tensor in a plain attribute is moved to the device of the arguments.
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return node.func.value
        return node


def _member(owner: ast.expr, name: str) -> ast.expr:
    if name.isdigit():
        return ast.Subscript(owner, ast.Constant(int(name)), ast.Load())
    return ast.Attribute(owner, name, ast.Load())


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
    scope = Scope({**function.__globals__, **arguments})
    return next((refusal for refusal in _refusals(definition.body, scope)), None)


def _refusals(body: list[ast.stmt], scope: Scope) -> Iterator[Refusal]:
    for statement in body:
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.UnaryOp):
            yield from _unmet(statement.test.operand, scope)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            result = statement.value
            yield from _unmet(result.test if isinstance(result, ast.IfExp) else result, scope)
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
    loop = _loop(condition)
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
    inner = find_refusal(function, {}) if function is not None else None
    if inner is None and isinstance(condition, ast.BoolOp):
        # All alternatives failed; the last one is the general one.
        inner = next(_unmet(condition.values[-1], scope), None)
    yield inner or Refusal(condition, scope)


def _loop(condition: ast.expr) -> tuple[ast.expr, str, ast.expr] | None:
    """The condition, variable and iterable of ``all(... for t in tensors)``; ``None`` for any other expression."""
    if not (isinstance(condition, ast.Call) and isinstance(condition.func, ast.Name) and condition.func.id == "all"):
        return None
    generator = condition.args[0]
    assert isinstance(generator, ast.GeneratorExp)
    target = generator.generators[0].target
    assert isinstance(target, ast.Name)
    return generator.elt, target.id, generator.generators[0].iter
