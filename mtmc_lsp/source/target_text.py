"""Source of a target without generated code: identifies what was measured, and detects when results become outdated."""

from __future__ import annotations

import re

from tree_sitter import Node

from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.source.dispatch.lambdas import assigned_lambdas
from mtmc_lsp.source.syntax import comments_above, field, holds_statements, parse, text_of, undecorated, with_decorators


def target_source(text: bytes, qualname: str) -> bytes | None:
    """The target's definition with decorators and the comments directly above it; None if there is no such target.

    ``text`` may be a part of a file: the generated block, if any, and the target's top-level statement. The result uses line
    feeds and has no trailing whitespace.
    """
    without_generated = strip_generated(text, qualname)
    root = parse(without_generated)
    definition = _find_definition(root, qualname.split("."))
    if definition is None:
        return None
    node = with_decorators(definition)
    comments = comments_above(without_generated, root, node)
    source = without_generated[(comments[0] if comments else node).start_byte : node.end_byte]
    return re.sub(rb"[ \t\r]*(?:\n|\Z)", b"\n", source)


def _find_definition(node: Node, names: list[str]) -> Node | None:
    """The last definition with this qualified name."""
    definition: Node | None = None
    for child in node.children:
        inner = undecorated(child)
        if any([name] == names for name, _ in assigned_lambdas(child)):
            definition = child
        elif inner.type in ("function_definition", "class_definition"):
            if text_of(field(inner, "name")) == names[0]:
                body = field(inner, "body")
                nested = _find_definition(body, names[1:]) if len(names) > 1 and body is not None else None
                definition = (inner if len(names) == 1 else nested) or definition
        elif holds_statements(child):
            definition = _find_definition(child, names) or definition
    return definition
