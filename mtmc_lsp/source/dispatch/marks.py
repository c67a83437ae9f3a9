"""Where generated dispatch statements are in a file."""

from __future__ import annotations

from tree_sitter import Node

from mtmc_lsp.source.syntax import field, line_end, line_start, text_of, walk

DISPATCH = "# mtmc: dispatch"
"""The mark at the end of the first line of each dispatch statement."""


def generated_part(text: bytes, mark: Node) -> bytes:
    """The text of a dispatch statement without the user's statements in its ``else`` branch."""
    start, end = dispatch_span(text, mark)
    branch = field(statement_of(mark), "alternative")
    return text[start : end if branch is None else branch.start_byte]


def dispatch_marks(root: Node) -> list[Node]:
    """The comments that mark dispatch statements."""
    return [item for item in walk(root) if item.type == "comment" and text_of(item).startswith(DISPATCH)]


def owner_of(mark: Node) -> str:
    """The qualified name of the function whose body contains a dispatch statement."""
    names: list[str] = []
    node = mark.parent
    while node is not None:
        if node.type in ("function_definition", "class_definition"):
            names.insert(0, text_of(field(node, "name")))
        elif node.type == "lambda" and node.parent is not None and not names:
            names.insert(0, text_of(field(node.parent, "left")))
        node = node.parent
    return ".".join(names)


def statement_of(mark: Node) -> Node:
    """The complete statement that contains a dispatch marker."""
    node = mark
    while node.parent is not None and node.parent.type not in ("block", "module"):
        node = node.parent
    return node


def dispatch_span(text: bytes, mark: Node) -> tuple[int, int]:
    """Byte range of the lines of the statement that contains a dispatch marker."""
    statement = statement_of(mark)
    if statement.type != "ERROR" and not statement.has_error:
        return line_start(text, statement.start_byte), line_end(text, statement.end_byte - 1)
    # Code with a syntax error: a statement may extend to the end of the file. Use lines with more indentation instead.
    start, end = line_start(text, mark.start_byte), line_end(text, mark.start_byte)
    indent_width = len(text[start:end]) - len(text[start:end].lstrip())
    while end < len(text):
        line = text[end : line_end(text, end)]
        if len(line) - len(line.lstrip()) <= indent_width or not line.strip():
            break
        end += len(line)
    return start, end
