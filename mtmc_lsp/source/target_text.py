"""The original text of a target without generated code. Results of a run become stale when it changes."""

from __future__ import annotations

import re

from tree_sitter import Node

from mtmc_lsp.source.compose import BEGIN, END, strip_generated
from mtmc_lsp.source.syntax import comments_above, field, holds_statements, parse, text_of, undecorated, with_decorators


def original_text(text: bytes, qualname: str) -> bytes | None:
    """The target's definition with its decorators and adjacent comments; None if it does not exist.

    ``text`` may be a part of a file: from the generated block, if there is one, to the end of the target's top-level
    statement. The result has line feeds as line endings and no trailing whitespace.
    """
    plain = strip_generated(text, qualname)
    root = parse(plain)
    definition = _last_definition(root, qualname.split("."))
    if definition is None:
        return None
    node = with_decorators(definition)
    comments = comments_above(plain, root, node)
    definition_text = plain[(comments[0] if comments else node).start_byte : node.end_byte]
    return re.sub(rb"[ \t\r]*(?:\n|\Z)", b"\n", definition_text)


def generated_block(text: bytes, qualname: str) -> str | None:
    """The generated block of a target without its markers; None if there is none."""
    begin, end = (f"{mark} {qualname}".encode() for mark in (BEGIN, END))
    match = re.search(
        re.escape(begin) + rb"[ \t]*\r?\n((?:.*\n)*?)" + re.escape(end) + rb"[ \t]*\r?$", text, re.MULTILINE
    )
    return match[1].decode("utf-8", "surrogatepass").replace("\r\n", "\n") if match is not None else None


def block_start(text: bytes, qualname: str) -> int:
    """Byte offset of the generated block of a target; -1 if there is none."""
    marker = f"{BEGIN} {qualname}".encode()
    offset = text.find(marker)
    while offset >= 0 and text[offset + len(marker) : offset + len(marker) + 1] not in (b"\n", b"\r", b" ", b""):
        offset = text.find(marker, offset + 1)
    return offset


def _last_definition(node: Node, names: list[str]) -> Node | None:
    """The last definition with this qualified name."""
    result: Node | None = None
    for child in node.children:
        inner = undecorated(child)
        if inner.type in ("function_definition", "class_definition"):
            if text_of(field(inner, "name")) == names[0]:
                body = field(inner, "body")
                nested = _last_definition(body, names[1:]) if len(names) > 1 and body is not None else None
                result = (inner if len(names) == 1 else nested) or result
        elif holds_statements(child):
            result = _last_definition(child, names) or result
    return result
