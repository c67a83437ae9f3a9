"""Which statements of a file may call a target while the file is being imported.

The launcher must exist when its target is called, so it is defined above the first such statement.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.imports import bindings, bindings_of
from mtmc_lsp.source.syntax import field, text_of, undecorated, walk

DYNAMIC = frozenset({"globals", "locals", "vars", "eval", "exec", "modules", "import_module", "__import__"})
"""Names that give access to a target without naming it."""
MODULES_WITHOUT_CALLS = sys.stdlib_module_names | {"torch", "triton", "typing_extensions"}
"""Modules whose decorators never call what they decorate before a call of the user, and keep it in no registry."""
DEFINITIONS = ("function_definition", "class_definition")
NOT_EXECUTED = ("function_definition", "lambda")
"""Syntax whose body does not run where it is defined."""


def first_caller(root: Node, statement: Node) -> Node | None:
    """The first top-level statement that may call a function that ``statement`` defines, while the file is imported.

    A statement counts if it makes a call and names something that leads to the function: the function itself, its class, or
    other names of the file whose code names them in turn. Every main guard counts. After a decorator of another package
    received such a name, every call counts, because the package may have kept it.

    Args:
        root: the tree of the file.
        statement: the top-level statement that contains the target. It counts itself if it calls what it defines.
    """
    defined = {binding.name for binding in bindings_of(statement)}
    inner = {text_of(field(item, "name")) for item in walk(statement) if item.type == "function_definition"}
    if _calls(statement, defined | inner) or _is_called_by_decorator(root, statement):
        return statement
    leading = _leading_names(root, defined)
    imported = {binding.name: binding.module for binding in bindings(root)}
    is_kept = False
    for item in root.named_children:
        if _defines_one_of(item, leading):
            is_kept |= any(not _is_known(decorator, imported) for decorator in _decorators(item))
        names = None if is_kept else leading | DYNAMIC
        if item.start_byte > statement.start_byte and (_is_main_guard(item) or _calls(item, names)):
            return item
    return None


def _leading_names(root: Node, names: set[str]) -> set[str]:
    """Names of the file through which the functions ``names`` can be reached."""
    imported = {binding.name for binding in bindings(root) if binding.module}
    links: list[tuple[set[str], set[str]]] = []
    for statement in root.named_children:
        is_definition = undecorated(statement).type in DEFINITIONS
        for item in [statement] if is_definition else walk(statement):
            if undecorated(item).type in DEFINITIONS:
                links.append((_identifiers(item), {text_of(field(undecorated(item), "name"))}))
        if not is_definition:
            # ``TABLE["a"] = f`` and ``TABLE.append(f)`` change what ``TABLE`` leads to.
            together = _executed_names(statement)
            links.append((together, together - imported))
    leading = set(names)
    while True:
        added = {name for mentioned, bound in links if mentioned & leading for name in bound} - leading
        if not added:
            return leading
        leading |= added


def _calls(statement: Node, names: set[str] | frozenset[str] | None) -> bool:
    """Whether importing the statement makes a call that may involve one of ``names``; ``None`` stands for any name."""
    return any(
        any(item.type in ("call", "await") for item in _walk_executed(part, NOT_EXECUTED))
        and (names is None or bool(names & _executed_names(part)))
        for part in _executed(statement)
    )


def _executed(statement: Node) -> Iterator[Node]:
    """The parts of a statement that run when the file is imported."""
    node = undecorated(statement)
    if node.type == "function_definition":
        parts = [field(node, "parameters")]
    elif node.type == "class_definition":
        body = field(node, "body")
        parts = [field(node, "superclasses")]
        for child in body.named_children if body is not None else ():
            yield from _executed(child)
    else:
        parts = [node]
    yield from (part for part in parts if part is not None)


def _walk_executed(node: Node, skipped: tuple[str, ...]) -> Iterator[Node]:
    """``node`` and its descendants, without those of the ``skipped`` types."""
    pending = [node]
    while pending:
        item = pending.pop()
        yield item
        pending += [child for child in item.children if child.type not in skipped]


def _executed_names(part: Node) -> set[str]:
    """Names in code that runs. A lambda counts: it may be passed to the code that calls it."""
    return {text_of(item) for item in _walk_executed(part, NOT_EXECUTED[:1]) if item.type == "identifier"}


def _identifiers(node: Node) -> set[str]:
    return {text_of(item) for item in walk(node) if item.type == "identifier"}


def _is_main_guard(statement: Node) -> bool:
    condition = field(statement, "condition")
    return statement.type == "if_statement" and condition is not None and "__name__" in _identifiers(condition)


def _defines_one_of(statement: Node, names: set[str]) -> bool:
    return any(binding.name in names and not binding.module for binding in bindings_of(statement))


def _decorators(statement: Node) -> list[Node]:
    return [item for item in walk(statement) if item.type == "decorator"]


def _is_known(decorator: Node, imported: dict[str, str]) -> bool:
    """Whether a decorator is built in, or of a module that keeps no functions."""
    name = _first_name(decorator)
    return name not in imported or imported[name].partition(".")[0] in MODULES_WITHOUT_CALLS


def _first_name(decorator: Node) -> str:
    return next((text_of(item) for item in walk(decorator) if item.type == "identifier"), "")


def _is_called_by_decorator(root: Node, statement: Node) -> bool:
    """Whether a decorator that the file defines calls a function when it decorates it."""
    names = {_first_name(decorator) for decorator in _decorators(statement)}
    return any(
        _calls_its_parameter(function)
        for item in root.named_children
        if names & {binding.name for binding in bindings_of(item) if not binding.module}
        for function in walk(item)
        if function.type == "function_definition"
    )


def _calls_its_parameter(function: Node) -> bool:
    parameters, body = field(function, "parameters"), field(function, "body")
    if parameters is None or body is None:
        return False
    names = _identifiers(parameters)
    called = (field(item, "function") for item in _walk_executed(body, NOT_EXECUTED) if item.type == "call")
    return any(item is not None and item.type == "identifier" and text_of(item) in names for item in called)
