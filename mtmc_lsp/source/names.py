"""The user's own names for values."""

from __future__ import annotations

from mtmc_lsp.source.syntax import field, line_of, parse, text_of, walk


def assigned_names(text: bytes, start_line: int, end_line: int) -> dict[int, str]:
    """For each line of a simple assignment ``name = ...`` between the two lines, the name it assigns."""
    found: dict[int, str] = {}
    for node in walk(parse(text)):
        if node.type != "assignment" or not start_line <= line_of(node) <= end_line:
            continue
        left = field(node, "left")
        if left is not None and left.type == "identifier":
            for line in range(line_of(node), node.end_point[0] + 2):
                found[line] = text_of(left)
    return found
