"""Why a definition of the file cannot be a target: nested functions, lambda expressions, partial objects, ..."""

from __future__ import annotations

from tree_sitter import Node

from mtmc_lsp.source.nested_functions import TopLevel, enclosing, obstacle
from mtmc_lsp.source.syntax import field, line_of, parse_with_recovery, text_of, walk, with_decorators

MOVE = "Move its tensor code into a function of the file, and call that function."
BY_DECORATOR = {
    "property": ("is a property, which takes no arguments", MOVE),
    "cached_property": ("is a property, which takes no arguments", MOVE),
}
"""Decorator to the problem and its remedy."""


def unsupported_definition(text: bytes, name: str) -> tuple[str, str]:
    """The problem with the first definition of a name that is no target, as a clause, and the remedy."""
    root, broken = parse_with_recovery(text)
    kinds = ("function_definition", "class_definition")
    nodes = (node for tree in (root, *broken) for node in walk(tree) if node.type in kinds)
    node = next((node for node in nodes if text_of(field(node, "name")) == name), None)
    if node is None:
        return "is not a function, module, method of a module or kernel", MOVE
    if node.type == "class_definition":
        return "is a class, but not an nn.Module", "Optimise a function or a module that it uses."
    decorators = [
        text_of(item).lstrip("@").strip() for item in with_decorators(node).children if item.type == "decorator"
    ]
    known = next((BY_DECORATOR[item] for item in decorators if item in BY_DECORATOR), None)
    if known is not None:
        return known
    if any(child.type == "async" for child in node.children):
        return "is a coroutine", MOVE
    nested = obstacle(node, TopLevel.around(node))
    if nested is not None:
        return nested
    outer = enclosing(node)
    if outer is not None:
        outer_name = text_of(field(outer, "name"))
        return f"is a method of {outer_name}, which is not an nn.Module", f"Make {outer_name} an nn.Module. {MOVE}"
    return "is not a function, module, method of a module or kernel", MOVE


def assigned_callable(text: bytes, name: str) -> tuple[int, str, str] | None:
    """The line, problem and remedy for a variable with a lambda expression or the result of a call; None for other names."""
    root, _ = parse_with_recovery(text)
    for node in (item for item in walk(root) if item.type == "assignment" and text_of(field(item, "left")) == name):
        value = field(node, "right")
        if value is None or enclosing(node) is not None:
            continue
        if value.type == "parenthesized_expression" and value.named_children[0].type == "lambda":
            return line_of(node), "is a lambda expression in brackets", f"Write it as {name} = lambda ...: ..."
        arguments = field(value, "arguments")
        items = arguments.named_children if value.type == "call" and arguments is not None else []
        function = text_of(field(value, "function")).rpartition(".")[2]
        if function == "partial" and items:
            return line_of(node), f"is a functools.partial object of {text_of(items[0])}", _as_function(name, items)
        if items:
            is_name = items[0].type in ("identifier", "attribute")
            remedy = f"Optimise {text_of(items[0])}." if is_name else MOVE
            return line_of(node), f"is the result of {function}(...)", remedy
    return None


def _as_function(name: str, items: list[Node]) -> str:
    """The remedy for a partial object: it has no body that could call kernels."""
    positional = [text_of(item) for item in items[1:] if item.type != "keyword_argument"]
    keywords = [text_of(item) for item in items[1:] if item.type == "keyword_argument"]
    call = f"{text_of(items[0])}({', '.join([*positional, 'x', *keywords])})"
    return f"Write it as a function with a body, with its other parameters: def {name}(x): return {call}"
