"""Module-level name bindings of a file, and the position of its imports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tree_sitter import Node

from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.source.syntax import (
    comments_above,
    field,
    holds_statements,
    is_docstring,
    line_end,
    line_of,
    line_start,
    parse,
    text_of,
    undecorated,
    walk,
)

IMPORTS = frozenset({"import_statement", "import_from_statement", "future_import_statement"})
CONDITIONAL = frozenset({"if_statement", "for_statement", "while_statement", "case_clause"})


@dataclass(frozen=True)
class Binding:
    """A name that a module-level statement binds."""

    name: str
    module: str
    """Dotted path of the import; empty if the name is bound in another way."""
    line: int
    offset: int
    is_certain: bool = True
    """Whether the binding always happens on import of the file (true in a ``try``, false in an ``if``)."""
    is_fallback: bool = False
    """Whether the binding is in an ``except`` clause."""


def bindings(root: Node) -> tuple[Binding, ...]:
    """Every name bound at module level, in source order. ``if TYPE_CHECKING`` is skipped because it never runs."""
    return tuple(binding for child in root.children for binding in bindings_of(child))


def imported_names(statement: Node) -> list[tuple[str, str]]:
    """``(name, dotted path)`` of each name that an import statement binds."""
    module = text_of(field(statement, "module_name"))
    prefix = module if not module or module.endswith(".") else f"{module}."
    names = []
    for child in statement.children_by_field_name("name"):
        if child.type == "aliased_import":
            names.append((text_of(field(child, "alias")), prefix + text_of(field(child, "name"))))
        else:
            name = text_of(child)
            names.append((name, prefix + name) if module else (name.split(".")[0], name.split(".")[0]))
    return names


def bindings_of(node: Node) -> Iterator[Binding]:
    """Every name that a statement binds at module level."""
    kind = node.type
    if kind in IMPORTS:
        for name, module in imported_names(node):
            yield Binding(name, module, line_of(node), node.start_byte)
    elif kind in ("function_definition", "class_definition", "decorated_definition"):
        yield Binding(text_of(field(undecorated(node), "name")), "", line_of(node), node.start_byte)
    elif kind in ("assignment", "for_statement", "as_pattern_target"):
        left = node if kind == "as_pattern_target" else field(node, "left")
        for item in walk(left) if left is not None and (kind != "assignment" or field(node, "right")) else ():
            if item.type == "identifier" and (
                item.parent is None or item.parent.type not in ("attribute", "subscript")
            ):
                yield Binding(text_of(item), "", line_of(node), node.start_byte)
    yield from _nested_bindings(node)


def _nested_bindings(node: Node) -> Iterator[Binding]:
    """Bindings of the statements inside a compound statement."""
    if not (holds_statements(node) or node.type in ("expression_statement", "assignment", "with_item", "as_pattern")):
        return
    type_checking_body = field(node, "consequence") if _is_type_checking(field(node, "condition")) else None
    for child in node.children:
        if type_checking_body is not None and child == type_checking_body:
            continue
        for binding in bindings_of(child):
            certain = binding.is_certain and node.type not in CONDITIONAL
            fallback = binding.is_fallback or node.type in ("except_clause", "except_group_clause")
            yield replace(binding, is_certain=certain and not fallback, is_fallback=fallback)


def _is_type_checking(condition: Node | None) -> bool:
    return text_of(condition).rpartition(".")[2] == "TYPE_CHECKING"


def missing_imports(root: Node, path: str, required: tuple[str, ...], before: int) -> list[str]:
    """The ``required`` import statements that the file does not contain, in any form, before the offset ``before``.

    Raises:
        RequestError: the file uses one of the names for something else.
    """
    present = bindings(root)
    missing = []
    for statement in required:
        names = [pair for child in parse(statement.encode()).children for pair in imported_names(child)]
        for name, module in names:
            conflict = next((b for b in present if b.name == name and b.module != module and not b.is_fallback), None)
            if conflict is not None:
                raise RequestError(
                    f"the name {name!r} is used for something else here, but the kernels need it for `{statement}`",
                    where=Location(path, conflict.line),
                    remedy="Rename it in this file.",
                )
        certain = {(b.name, b.module) for b in present if b.is_certain and b.offset < before}
        if not certain.issuperset(names):
            missing.append(statement)
    return missing


def check_names_are_free(root: Node, path: str, code: str) -> None:
    """Refuse code that would replace something that the file defines otherwise.

    Raises:
        RequestError: the file and the code bind the same name by different statements.
    """
    defined = {binding.name: statement for statement, binding in _statements(parse(code.encode()))}
    for statement, binding in _statements(root):
        if binding.name in defined and statement != defined[binding.name]:
            raise RequestError(
                f"the name {binding.name!r} is used for something else here, but the generated code defines it",
                where=Location(path, binding.line),
                remedy="Rename it in this file.",
            )


def _statements(root: Node) -> Iterator[tuple[str, Binding]]:
    """The text of each top-level statement with each name that it binds."""
    for child in root.named_children:
        for binding in bindings_of(child):
            yield text_of(child).replace("\r\n", "\n"), binding


@dataclass(frozen=True)
class ImportPosition:
    """Where to insert imports, and how many empty lines to add around them."""

    offset: int
    blank_before: int = 0
    blank_after: int = 0


def import_position(text: bytes, root: Node, *, is_of_torch: bool = True) -> ImportPosition:
    """After the imports at the start of the file; without imports after its docstring, or else above the first statement.

    Args:
        is_of_torch: whether the position is after the imports of torch or triton, if there are any.
    """
    head: list[Node] = []
    docstring: Node | None = None
    first: Node | None = None
    for child in (item for item in root.children if item.type != "comment"):
        if first is None:
            first = child
            docstring = child if is_docstring(child) else None
            if docstring is not None:
                continue
        if child.type in IMPORTS:
            head.append(child)
        elif not _may_precede_imports(child):
            break
    if head:
        return ImportPosition(_offset_after(text, (is_of_torch and _last_of_torch(head)) or head[-1]))
    if docstring is not None:
        return ImportPosition(_offset_after(text, docstring), blank_before=1)
    return ImportPosition(statement_start(text, root, first) if first is not None else len(text), blank_after=2)


def _may_precede_imports(node: Node) -> bool:
    """Whether it is a conditional import, ``__all__`` or similar. False if it defines a function or class."""
    if node.type in ("if_statement", "try_statement"):
        return not any(item.type in ("function_definition", "class_definition") for item in walk(node))
    return node.type == "expression_statement" and text_of(node).startswith("__")


def _last_of_torch(head: list[Node]) -> Node | None:
    """The last ``import torch...`` or ``import triton...``. New imports sort after it and before any ``from``."""
    statements = [
        item
        for item in head
        if item.type == "import_statement"
        and text_of(item.named_children[0]).replace(" ", ".").split(".")[0] in ("torch", "triton")
    ]
    return statements[-1] if statements else None


def _offset_after(text: bytes, node: Node) -> int:
    """Offset of the line after a statement and all statements that share its last line."""
    following = node.next_named_sibling
    while following is not None and following.start_point[0] == node.end_point[0]:
        node, following = following, following.next_named_sibling
    return line_end(text, node.end_byte)


def first_on_line(node: Node) -> Node:
    """The first of the statements that share the node's first line with it."""
    previous = node.prev_named_sibling
    while previous is not None and previous.end_point[0] == node.start_point[0]:
        node, previous = previous, previous.prev_named_sibling
    return node


def statement_start(text: bytes, root: Node, node: Node) -> int:
    """Offset of the first line of a top-level statement, including the comments directly above it.

    A ``#!`` or coding line stays at the start of the file, and an end marker stays with its generated block.
    """
    start = line_start(text, node.start_byte)
    for comment in reversed(comments_above(text, root, node)):
        comment_text = text_of(comment)
        is_head = comment.start_point[0] < 2 and (
            comment_text.startswith("#!") or "coding:" in comment_text or "coding=" in comment_text
        )
        if (
            is_head
            or comment_text.startswith("# mtmc: end ")
            or comment.start_byte != line_start(text, comment.start_byte)
        ):
            break
        start = comment.start_byte
    return start
