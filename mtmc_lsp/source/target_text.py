"""A target's own words, apart from what was generated for it: what a measurement is of, and what can make it stale."""

from __future__ import annotations

import re

from tree_sitter import Node

from mtmc_lsp.source.compose import BEGIN, END, strip_generated
from mtmc_lsp.source.syntax import comments_above, field, holds_statements, parse, text_of, undecorated, with_decorators


def own_text(text: bytes, qualname: str) -> bytes | None:
    """The target's definition with its decorators and the comments that touch it; None where there is none.

    ``text`` may be a part of a file: from the generated block, if there is one, to the end of the target's top-level
    statement. Line endings are line feeds in the answer, and space at the ends of lines is left out.
    """
    plain = strip_generated(text, qualname)
    root = parse(plain)
    found = _named(root, qualname.split("."))
    if found is None:
        return None
    node = with_decorators(found)
    above = comments_above(plain, root, node)
    words = plain[(above[0] if above else node).start_byte : node.end_byte]
    return re.sub(rb"[ \t\r]*(?:\n|\Z)", b"\n", words)


def generated_block(text: bytes, qualname: str) -> str | None:
    """The kernels that were put in for a target, without their marks; None where there are none."""
    begin, end = (f"{mark} {qualname}".encode() for mark in (BEGIN, END))
    found = re.search(
        re.escape(begin) + rb"[ \t]*\r?\n((?:.*\n)*?)" + re.escape(end) + rb"[ \t]*\r?$", text, re.MULTILINE
    )
    return found[1].decode("utf-8", "surrogatepass").replace("\r\n", "\n") if found is not None else None


def block_start(text: bytes, qualname: str) -> int:
    """Where the generated block of a target begins; -1 where there is none."""
    mark = f"{BEGIN} {qualname}".encode()
    at = text.find(mark)
    while at >= 0 and text[at + len(mark) : at + len(mark) + 1] not in (b"\n", b"\r", b" ", b""):
        at = text.find(mark, at + 1)
    return at


def _named(node: Node, names: list[str]) -> Node | None:
    """The last definition of that qualified name."""
    found: Node | None = None
    for child in node.children:
        inner = undecorated(child)
        if inner.type in ("function_definition", "class_definition"):
            if text_of(field(inner, "name")) == names[0]:
                body = field(inner, "body")
                below = _named(body, names[1:]) if len(names) > 1 and body is not None else None
                found = (inner if len(names) == 1 else below) or found
        elif holds_statements(child):
            found = _named(child, names) or found
    return found
