"""Configurations that an author's file computes by list comprehensions, lists in variables, or functions that return a list."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from mtmc_lsp.kernels.actions.tuning.configuration import OPTIONS, Configuration

MOST_COMPUTED = 512
"""Longer lists are not read."""
MOST_DEPTH = 3
"""How many names and functions are followed."""


def computed_configurations(expression: str, text: bytes) -> tuple[Configuration, ...]:
    """The configurations of an expression in a file; empty if the text does not tell them."""
    try:
        module = ast.parse(text)
        found = list(_configurations(ast.parse(expression.strip(), mode="eval").body, module, MOST_DEPTH))
    except (ValueError, SyntaxError, TypeError, KeyError):
        return ()
    return tuple(found) if len(found) <= MOST_COMPUTED else ()


def _configurations(node: ast.expr, module: ast.Module, depth: int) -> Iterator[Configuration]:
    """The configurations of a list.

    Raises:
        ValueError: the text does not tell them.
    """
    if isinstance(node, ast.List):
        for item in node.elts:
            yield _configuration(item, {})
    elif isinstance(node, ast.ListComp):
        for names in _bindings(node.generators, {}):
            yield _configuration(node.elt, names)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _configurations(node.left, module, depth)
        yield from _configurations(node.right, module, depth)
    elif depth:
        yield from _configurations(_definition(node, module), module, depth - 1)
    else:
        raise ValueError


def _definition(node: ast.expr, module: ast.Module) -> ast.expr:
    """The list that a variable of the file has, or that a function without arguments returns."""
    found: list[ast.expr | None] = []
    if isinstance(node, ast.Name):
        for statement in module.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id == node.id for target in targets):
                found.append(statement.value)  # type: ignore[attr-defined]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args and not node.keywords:
        for statement in module.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == node.func.id:
                body = [item for item in statement.body if not _is_docstring(item)]
                found += [body[0].value] if len(body) == 1 and isinstance(body[0], ast.Return) else [None]
    if len(found) != 1 or found[0] is None:
        raise ValueError
    return found[0]


def _is_docstring(item: ast.stmt) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)


def _bindings(generators: list[ast.comprehension], names: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """The values of the names of a comprehension, one mapping for each element."""
    if not generators:
        yield names
        return
    first, *rest = generators
    if first.ifs or not isinstance(first.target, ast.Name):
        raise ValueError
    for value in _iterated(first.iter):
        yield from _bindings(rest, {**names, first.target.id: value})


def _iterated(node: ast.expr) -> list[object]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        return list(range(*(ast.literal_eval(item) for item in node.args)))
    return list(ast.literal_eval(node))


def _configuration(node: ast.expr, names: Mapping[str, object]) -> Configuration:
    """``triton.Config({...}, num_warps=4)`` with the values of names."""
    function = node.func if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or not isinstance(function, (ast.Name, ast.Attribute)):
        raise ValueError
    if (function.attr if isinstance(function, ast.Attribute) else function.id) != "Config":
        raise ValueError
    values = {item.arg: item.value for item in node.keywords}
    blocks = node.args[0] if len(node.args) == 1 else values.pop("kwargs")
    if not isinstance(blocks, ast.Dict) or values.keys() - OPTIONS.keys():
        raise ValueError
    constants = tuple(
        (str(ast.literal_eval(key)) if key is not None else "", _value(value, names))
        for key, value in zip(blocks.keys, blocks.values, strict=True)
    )
    options = {str(name): _value(value, names) for name, value in values.items()}
    numbers = {**OPTIONS, **options}
    if not all(type(numbers[name]) is int for name in OPTIONS):
        raise ValueError
    return Configuration(constants, *(int(str(numbers[name])) for name in OPTIONS))


def _value(node: ast.expr, names: Mapping[str, object]) -> object:
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, names), _value(node.right, names)
        if isinstance(left, int) and isinstance(right, int):
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Pow) and 0 <= right < 32:
                return left**right
            if isinstance(node.op, ast.FloorDiv) and right:
                return left // right
        raise ValueError
    return ast.literal_eval(node)
