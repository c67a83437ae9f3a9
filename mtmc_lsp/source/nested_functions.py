"""Functions inside functions: which of them can be called without the function around them."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from functools import cached_property, lru_cache

from tree_sitter import Node

from mtmc_lsp.source.syntax import field, line_of, text_of, with_decorators


class TopLevel:
    """A top-level statement, with what the functions inside it read."""

    def __init__(self, statement: Node) -> None:
        self.statement = statement

    @classmethod
    def around(cls, node: Node) -> TopLevel:
        """The statement that contains a node."""
        while node.parent is not None and node.parent.parent is not None:
            node = node.parent
        return cls(node)

    @cached_property
    def free_variables(self) -> dict[tuple[str, int], tuple[str, ...]]:
        """The free variables of each function in the statement, by name and line; empty if it does not parse."""
        return _free_variables(self.statement.text or b"")


def obstacle(function: Node, top: TopLevel) -> tuple[str, str] | None:
    """Why a function cannot be called without the function around it, as a clause, and the remedy; None if it can."""
    outer = enclosing(function)
    if outer is None or outer.type != "function_definition":
        return None
    name, outer_name = text_of(field(function, "name")), text_of(field(outer, "name"))
    move = f"move {name} to the top level, or optimise {outer_name}"
    if with_decorators(function) is not function:
        problem = f"has a decorator that runs only while {outer_name} runs"
        return f"is defined inside {outer_name} and {problem}", f"Remove the decorator, {move}."
    names = _names_from_outside(function, top)
    if names is None:
        return f"is defined inside {outer_name}, which does not parse", "Correct the syntax error first."
    if names:
        listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        problem = f"reads {listed} of {outer_name}, and there is no value for this before {outer_name} runs"
        return problem, f"Pass {listed} as {'arguments' if len(names) > 1 else 'an argument'}, {move}."
    default = next((text for text in _defaults(function) if not _is_constant(text)), "")
    if default:
        return f"has the default value {default}, which only {outer_name} computes", f"Write a constant, {move}."
    return None


def enclosing(node: Node) -> Node | None:
    """The innermost function or class around a definition."""
    outer = node.parent
    while outer is not None and outer.type not in ("function_definition", "class_definition"):
        outer = outer.parent
    return outer


def _names_from_outside(function: Node, top: TopLevel) -> list[str] | None:
    """The variables of enclosing functions that a function reads; None if its top-level statement does not parse."""
    key = (text_of(field(function, "name")), line_of(function) - line_of(top.statement) + 1)
    return sorted(top.free_variables[key]) if key in top.free_variables else None


@lru_cache(maxsize=256)
def _free_variables(statement: bytes) -> dict[tuple[str, int], tuple[str, ...]]:
    try:
        table = symtable.symtable(statement.decode(), "", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The last two: nested too deeply for Python.
        return {}
    return {
        (item.get_name(), item.get_lineno()): item.get_frees()
        for item in _tables_in(table)
        if isinstance(item, symtable.Function)
    }


def _tables_in(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _tables_in(child)


def _defaults(function: Node) -> Iterator[str]:
    parameters = field(function, "parameters")
    for parameter in parameters.named_children if parameters is not None else ():
        value = field(parameter, "value")
        if value is not None:
            yield text_of(value)


def _is_constant(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return True
