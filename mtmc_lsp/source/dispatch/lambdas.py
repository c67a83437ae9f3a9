"""The dispatch of ``name = lambda ...``: a conditional expression around the user's expression, which keeps its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.dispatch.regions import Edit
from mtmc_lsp.source.line_wrapping import MAX_LINE, wrapped
from mtmc_lsp.source.syntax import field, line_start, text_of


def assigned_lambdas(statement: Node) -> Iterator[tuple[str, Node]]:
    """The name and the lambda expression of a statement ``name = lambda ...``; nothing for other statements."""
    for assignment in statement.children if statement.type == "expression_statement" else ():
        if assignment.type == "assignment":
            name, value = field(assignment, "left"), field(assignment, "right")
            if name is not None and value is not None and (name.type, value.type) == ("identifier", "lambda"):
                yield text_of(name), value


def lambda_edit(text: bytes, function: Node, dispatch: str, mark: str, newline: bytes) -> Edit | None:
    """The edit that inserts a dispatch, given as an ``if`` statement; None if it needs more than an expression."""
    statement = ast.parse(dispatch).body[0]
    body = field(function, "body")
    assert isinstance(statement, ast.If) and body is not None
    (returned, *others) = statement.body
    if others or not isinstance(returned, ast.Return) or returned.value is None:
        return None
    indent = _indent(text, function)
    call, condition = ast.unparse(returned.value), ast.unparse(statement.test)
    choice = f"(\n    {call}\n    if {condition}  {mark}\n    else None)\n"
    lines = wrapped(choice, MAX_LINE - len(indent.expandtabs(4))).removesuffix("None)\n").split("\n")
    prefix = (newline + indent).join(line.encode() for line in lines)
    user_text = text[body.start_byte : body.end_byte]
    return Edit(body.start_byte, body.end_byte, prefix + user_text + newline + indent + b")")


def without_lambda_dispatch(text: bytes, mark: Node) -> Edit | None:
    """The edit that restores the user's expression; None if the marked dispatch is not in a lambda expression."""
    node: Node | None = mark
    while node is not None and node.type not in ("lambda", "block", "module"):
        node = node.parent
    body = field(node, "body") if node is not None and node.type == "lambda" else None
    if body is None or body.has_error:
        return None
    choice = next((child for child in body.named_children if child.type == "conditional_expression"), None)
    if choice is None:
        return None
    original = choice.named_children[-1]
    return Edit(body.start_byte, body.end_byte, text[original.start_byte : original.end_byte])


def _indent(text: bytes, node: Node) -> bytes:
    line = text[line_start(text, node.start_byte) : node.start_byte]
    return line[: len(line) - len(line.lstrip(b" \t"))]
