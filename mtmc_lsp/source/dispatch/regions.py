"""The dispatch of a region, between the user's statements, and the user's statements without it.

A region that ends the function needs no change of the user's lines: the dispatch returns. Every other region becomes the
``else`` branch of its dispatch, since Python can skip statements only by indentation. Lines inside strings keep their text.
"""

from __future__ import annotations

from typing import NamedTuple

from tree_sitter import Node

from mtmc_lsp.core.workload import CodeRegion
from mtmc_lsp.source.syntax import field, line_end, line_start, parse, walk

COMPOUND_PARENTS = ("block", "module")


class Edit(NamedTuple):
    """Replacement of a byte range."""

    start: int
    end: int
    new: bytes


class Place(NamedTuple):
    """Where a region is."""

    start: int
    """Offset of its first line."""
    end: int
    """Offset after its last line."""
    indent: bytes
    step: bytes
    """What the indentation of its suite adds to that of the statement around it."""


def region_place(text: bytes, function: Node, region: CodeRegion) -> Place | None:
    """The lines of a region; ``None`` if its first statement does not start a line."""
    first = next(
        (
            node
            for node in walk(function)
            if node.start_point[0] == region.start_line - 1
            and node.parent is not None
            and node.parent.type in COMPOUND_PARENTS
            and node.type != "comment"
        ),
        None,
    )
    if first is None or first.parent is None or first.parent.parent is None:
        return None
    start, outer_start = (line_start(text, node.start_byte) for node in (first, first.parent.parent))
    indent = text[start : first.start_byte]
    outer = text[outer_start : outer_start + len(text[outer_start:]) - len(text[outer_start:].lstrip(b" \t"))]
    if indent.strip() or not indent.startswith(outer) or start == outer_start:
        return None
    end = start
    for _ in range(region.end_line - region.start_line + 1):
        end = line_end(text, end)
    return Place(start, end, indent, indent[len(outer) :])


def region_edits(text: bytes, place: Place, region: CodeRegion, dispatch: bytes, newline: bytes) -> list[Edit]:
    """The edits that insert an indented dispatch statement for a region."""
    if region.returns:
        return [Edit(place.start, place.start, dispatch)]
    original = b"".join(
        _indented(line, place.indent, place.step) if is_code else line
        for line, is_code in _lines(text, place.start, place.end)
    )
    return [Edit(place.start, place.end, dispatch + place.indent + b"else:" + newline + original)]


def without_region_dispatch(text: bytes, statement: Node) -> Edit | None:
    """The edit that restores the statements in the ``else`` branch of a dispatch; ``None`` if it has no such branch."""
    body = field(field(statement, "alternative"), "body") if statement.type == "if_statement" else None
    inside = [child for child in body.named_children if child.type != "comment"] if body is not None else []
    if not inside or statement.has_error:
        return None
    start, first = line_start(text, statement.start_byte), line_start(text, inside[0].start_byte)
    indent = text[start : statement.start_byte]
    step = text[first : inside[0].start_byte][len(indent) :]
    end = line_end(text, inside[-1].end_byte - 1)
    original = b"".join(
        _outdented(line, indent, step) if is_code else line for line, is_code in _lines(text, first, end)
    )
    return Edit(start, end, original)


def _lines(text: bytes, start: int, end: int) -> list[tuple[bytes, bool]]:
    """The lines in a byte range, and whether each starts outside strings and is not blank."""
    first_row = text.count(b"\n", 0, start)
    inside_strings = {
        row
        for node in walk(parse(text))
        if node.type == "string"
        for row in range(node.start_point[0] + 1, node.end_point[0] + 1)
    }
    lines = text[start:end].splitlines(keepends=True)
    return [(line, bool(line.strip()) and row not in inside_strings) for row, line in enumerate(lines, first_row)]


def _indented(line: bytes, indent: bytes, step: bytes) -> bytes:
    return indent + step + line[len(indent) :] if line.startswith(indent) else step + line


def _outdented(line: bytes, indent: bytes, step: bytes) -> bytes:
    """Inverse of :func:`_indented`."""
    if line.startswith(indent + step):
        return indent + line[len(indent + step) :]
    return line.removeprefix(step)
