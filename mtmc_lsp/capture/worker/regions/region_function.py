"""A region as a function of its inputs, which the rest of the program calls like a whole target."""

from __future__ import annotations
import __future__

import ast
import linecache
from types import FunctionType, MethodType
from typing import Any

from mtmc_lsp.capture.regions.statements import Function, Statements, function_at
from mtmc_lsp.core.workload import CodeRegion


def region_function(function: Any, region: CodeRegion) -> Any:
    """The statements of a region of ``function`` as a function, or as a method bound to the same instance.

    It takes the region's inputs and returns its outputs. Its lines and globals are those of ``function``.
    """
    receiver = function.__self__ if isinstance(function, MethodType) else None
    outer: Any = function.__func__ if isinstance(function, MethodType) else function
    definition, lines = definition_of(outer)
    statements = Statements(definition, lines)
    run = statements.run(region.first, region.last)
    body = [*(statements.all[number] for number in region.repeated), *run]
    if not region.returns:
        body.append(ast.copy_location(_return(region.outputs), body[-1]))
    parameters = [*definition.args.posonlyargs, *definition.args.args]
    names = [*([parameters[0].arg] if receiver is not None else []), *region.inputs]
    inner = _compiled(outer, names, body)
    return MethodType(inner, receiver) if receiver is not None else inner


def definition_of(function: FunctionType) -> tuple[Function, list[str]]:
    """The syntax tree of a function, and the lines of its file."""
    lines = linecache.getlines(function.__code__.co_filename)
    definition = function_at("".join(lines), function.__code__.co_name, function.__code__.co_firstlineno)
    if definition is None:
        raise ValueError(f"{function.__qualname__} is not in line {function.__code__.co_firstlineno} of its file")
    return definition, lines


def _return(outputs: tuple[str, ...]) -> ast.Return:
    names: list[ast.expr] = [ast.Name(name, ast.Load()) for name in outputs]
    if len(names) > 1:
        return ast.Return(ast.Tuple(names, ast.Load()))
    return ast.Return(names[0] if names else ast.Constant(None))


def _compiled(outer: FunctionType, names: list[str], body: list[ast.stmt]) -> FunctionType:
    """A function with this body in the scope of ``outer``: its globals, its class for private names and ``super()``."""
    # A class around the function gives it the names that a method has.
    owner = outer.__qualname__.rpartition(".")[0].rpartition(".")[2]
    holder = owner if owner.isidentifier() else "_"
    tree = ast.parse(f"class {holder}:\n def {outer.__name__}({', '.join(names)}): pass")
    kind = tree.body[0]
    assert isinstance(kind, ast.ClassDef) and isinstance(kind.body[0], ast.FunctionDef)
    kind.body[0].body = body
    kind.body[0].lineno = kind.lineno = min(item.lineno for item in body)
    kind.body[0].end_lineno = kind.end_lineno = body[-1].end_lineno
    ast.fix_missing_locations(tree)
    scope: dict[str, Any] = {}
    future = outer.__code__.co_flags & __future__.annotations.compiler_flag
    code = compile(tree, outer.__code__.co_filename, "exec", future, dont_inherit=True)
    exec(code, outer.__globals__, scope)
    inner: FunctionType = vars(scope[holder])[outer.__name__]
    cells = dict(zip(outer.__code__.co_freevars, outer.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in inner.__code__.co_freevars)
    return FunctionType(inner.__code__, outer.__globals__, outer.__name__, None, closure)
