"""The user's own names for values."""

from __future__ import annotations

from mtmc_lsp.source.syntax import field, line_of, parse, text_of, walk


def assigned_names(text: bytes, start_line: int, end_line: int) -> dict[int, str]:
    """For each line of a statement ``name = ...`` (or ``name += ...``) that starts between the two lines, that name.

    Where a line holds several, the last name stands, since it names what the line comes to.
    """
    found: dict[int, str] = {}
    for node in walk(parse(text)):
        if node.type not in ("assignment", "augmented_assignment") or not start_line <= line_of(node) <= end_line:
            continue
        left = field(node, "left")
        if left is None or left.type != "identifier" or field(node, "right") is None:
            continue
        if node.parent is not None and node.parent.type == "assignment":
            continue  # the second name of `a = b = value`
        for line in range(line_of(node), node.end_point[0] + 2):
            found[line] = text_of(left)
    return found
