"""What the names of a file mean at module level, and where its imports stand."""

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
    """Dotted path of what is imported; empty where the name is bound otherwise."""
    line: int
    offset: int
    is_certain: bool = True
    """Whether it happens whenever the file is imported (a ``try`` counts, an ``if`` does not)."""
    is_fallback: bool = False
    """Whether it stands in an ``except``."""


def bindings(root: Node) -> tuple[Binding, ...]:
    """Every name bound at module level, in source order; ``if TYPE_CHECKING`` is left out, as it never runs."""
    return tuple(found for child in root.children for found in _bound(child))


def imported(statement: Node) -> list[tuple[str, str]]:
    """``(name, dotted path)`` of what an import statement binds."""
    module = text_of(field(statement, "module_name"))
    prefix = module if not module or module.endswith(".") else f"{module}."
    found = []
    for child in statement.children_by_field_name("name"):
        if child.type == "aliased_import":
            found.append((text_of(field(child, "alias")), prefix + text_of(field(child, "name"))))
        else:
            name = text_of(child)
            found.append((name, prefix + name) if module else (name.split(".")[0], name.split(".")[0]))
    return found


def _bound(node: Node) -> Iterator[Binding]:
    kind = node.type
    if kind in IMPORTS:
        for name, module in imported(node):
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
    yield from _bound_below(node)


def _bound_below(node: Node) -> Iterator[Binding]:
    """What the statements inside a compound statement bind."""
    if not (holds_statements(node) or node.type in ("expression_statement", "assignment", "with_item", "as_pattern")):
        return
    never = field(node, "consequence") if _is_type_checking(field(node, "condition")) else None
    for child in node.children:
        if never is not None and child == never:
            continue
        for found in _bound(child):
            certain = found.is_certain and node.type not in CONDITIONAL
            fallback = found.is_fallback or node.type in ("except_clause", "except_group_clause")
            yield replace(found, is_certain=certain and not fallback, is_fallback=fallback)


def _is_type_checking(condition: Node | None) -> bool:
    return text_of(condition).rpartition(".")[2] == "TYPE_CHECKING"


def missing_imports(root: Node, path: str, wanted: tuple[str, ...], before: int) -> list[str]:
    """The statements of ``wanted`` that the file does not make, in any form, above the offset ``before``.

    Raises:
        RequestError: one of the names means something else in the file.
    """
    present = bindings(root)
    missing = []
    for statement in wanted:
        names = [pair for child in parse(statement.encode()).children for pair in imported(child)]
        for name, module in names:
            other = next((b for b in present if b.name == name and b.module != module and not b.is_fallback), None)
            if other is not None:
                raise RequestError(
                    f"the name {name!r} means something else here, and the kernels need it for `{statement}`",
                    where=Location(path, other.line),
                    remedy="Give it another name in this file.",
                )
        certain = {(b.name, b.module) for b in present if b.is_certain and b.offset < before}
        if not certain.issuperset(names):
            missing.append(statement)
    return missing


@dataclass(frozen=True)
class ImportPlace:
    """Where imports are added, and the empty lines that then stand around them."""

    offset: int
    blank_before: int = 0
    blank_after: int = 0


def import_place(text: bytes, root: Node) -> ImportPlace:
    """Behind the imports at the head of the file; without any, behind its docstring; else above its first statement."""
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
        return ImportPlace(_behind(text, _last_of_torch(head) or head[-1]))
    if docstring is not None:
        return ImportPlace(_behind(text, docstring), blank_before=1)
    return ImportPlace(above(text, root, first) if first is not None else len(text), blank_after=2)


def _may_precede_imports(node: Node) -> bool:
    """Conditional imports, ``__all__`` and the like; nothing that defines a function or class."""
    if node.type in ("if_statement", "try_statement"):
        return not any(item.type in ("function_definition", "class_definition") for item in walk(node))
    return node.type == "expression_statement" and text_of(node).startswith("__")


def _last_of_torch(head: list[Node]) -> Node | None:
    """The last ``import torch...`` or ``import triton...``: what is added sorts behind it, before any ``from``."""
    found = [
        item
        for item in head
        if item.type == "import_statement"
        and text_of(item.named_children[0]).replace(" ", ".").split(".")[0] in ("torch", "triton")
    ]
    return found[-1] if found else None


def _behind(text: bytes, node: Node) -> int:
    """Offset of the line behind a statement and all others that share its last line."""
    following = node.next_named_sibling
    while following is not None and following.start_point[0] == node.end_point[0]:
        node, following = following, following.next_named_sibling
    return line_end(text, node.end_byte)


def above(text: bytes, root: Node, node: Node) -> int:
    """Offset of the line where a top-level statement and the comments that touch it begin.

    A ``#!`` or coding line stays the first of the file, and the end mark of a generated block stays with the block.
    """
    start = line_start(text, node.start_byte)
    for comment in reversed(comments_above(text, root, node)):
        words = text_of(comment)
        is_head = comment.start_point[0] < 2 and (words.startswith("#!") or "coding:" in words or "coding=" in words)
        if is_head or words.startswith("# mtmc: end ") or comment.start_byte != line_start(text, comment.start_byte):
            break
        start = comment.start_byte
    return start
