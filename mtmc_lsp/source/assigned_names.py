"""Variable names that the user's code assigns values to."""

from __future__ import annotations

from mtmc_lsp.source.syntax import field, line_of, parse, text_of, walk


def assigned_names(text: bytes, start_line: int, end_line: int) -> dict[int, str]:
    """Map each line of an assignment ``name = ...`` (or ``name += ...``) that starts between the two lines to the name.

    If a line has several assignments, the last one counts.
    """
    names: dict[int, str] = {}
    for node in walk(parse(text)):
        if node.type not in ("assignment", "augmented_assignment") or not start_line <= line_of(node) <= end_line:
            continue
        left = field(node, "left")
        if left is None or left.type != "identifier" or field(node, "right") is None:
            continue
        if node.parent is not None and node.parent.type == "assignment":
            continue  # the second target of `a = b = value`
        for line in range(line_of(node), node.end_point[0] + 2):
            names[line] = text_of(left)
    return names
