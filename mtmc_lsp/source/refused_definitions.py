"""Why a definition of the file cannot be a target: nested functions, lambda expressions, partial objects, ..."""

from __future__ import annotations

from tree_sitter import Node

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
    outer = _enclosing(node)
    outer_name = text_of(field(outer, "name"))
    if outer is not None and outer.type == "function_definition":
        problem = f"is defined inside {outer_name}, so it does not exist before {outer_name} runs"
        return problem, f"Move it to the top level and pass what it uses as arguments, or optimise {outer_name}."
    if outer is not None:
        return f"is a method of {outer_name}, which is not an nn.Module", f"Make {outer_name} an nn.Module. {MOVE}"
    return "is not a function, module, method of a module or kernel", MOVE


def _enclosing(node: Node) -> Node | None:
    """The innermost function or class around a definition."""
    outer = node.parent
    while outer is not None and outer.type not in ("function_definition", "class_definition"):
        outer = outer.parent
    return outer


def assigned_callable(text: bytes, name: str) -> tuple[int, str, str] | None:
    """The line, problem and remedy for a variable with a lambda expression or the result of a call; None for other names."""
    root, _ = parse_with_recovery(text)
    for node in (item for item in walk(root) if item.type == "assignment" and text_of(field(item, "left")) == name):
        value = field(node, "right")
        if value is None or _enclosing(node) is not None:
            continue
        if value.type == "lambda":
            return line_of(node), "is a lambda expression", f"Write it as a function: def {name}(...): return ..."
        arguments = field(value, "arguments")
        items = arguments.named_children if value.type == "call" and arguments is not None else []
        function = text_of(field(value, "function")).rpartition(".")[2]
        if function == "partial" and items:
            bound = " ".join(text_of(item) for item in items[1:] if item.type == "keyword_argument")
            remedy = f"Optimise {text_of(items[0])}" + (f", with {bound} in its directive." if bound else ".")
            return line_of(node), f"is a functools.partial object of {text_of(items[0])}", remedy
        if items:
            is_name = items[0].type in ("identifier", "attribute")
            remedy = f"Optimise {text_of(items[0])}." if is_name else MOVE
            return line_of(node), f"is the result of {function}(...)", remedy
    return None
