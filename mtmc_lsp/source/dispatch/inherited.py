"""The dispatch of a class that inherits ``forward``: a method that calls the inherited one where the kernel does not run.

A dispatch statement in the base class would also run for its other subclasses.
"""

from __future__ import annotations

from tree_sitter import Node

from mtmc_lsp.core.workload import ContainerKind, Target
from mtmc_lsp.source.dispatch.regions import Edit
from mtmc_lsp.source.syntax import field, is_docstring, line_end, line_start, text_of, walk, with_decorators
from mtmc_lsp.source.workload.signatures import Parameter, signature_of

VALUES = frozenset(
    "integer float string concatenated_string true false none ellipsis unary_operator tuple - ( ) ,".split()
)
"""Syntax of defaults that mean the same in the subclass as in its base."""
INSIDE_STRINGS = frozenset({"string_start", "string_content", "string_end", "escape_sequence"})


def inherited_method(text: bytes, target: Target, dispatch: str) -> str | None:
    """The text of the method: the inherited parameters, the dispatch, and a call of the inherited ``forward``.

    Returns ``None`` if the file does not define that ``forward``, or if its parameters cannot be repeated.
    """
    signature = signature_of(text, target)
    parameters = field(signature.node, "parameters") if signature is not None else None
    if signature is None or parameters is None or not parameters.named_children:
        return None
    if with_decorators(signature.node) is not signature.node:
        # The kernel would run without what the decorator does.
        return None
    receiver, *rest = (child for child in parameters.named_children if child.type != "comment")
    separators = {"keyword_separator": "*", "positional_separator": "/"}
    known = {item.name: item for item in signature.parameters}
    if receiver.type != "identifier" or len(known) != sum(child.type not in separators for child in rest):
        return None
    declared, passed, by_name = [text_of(receiver)], [], False
    items = iter(signature.parameters)
    for child in rest:
        if child.type in separators:
            declared.append(separators[child.type])
            by_name = by_name or child.type == "keyword_separator"
            continue
        item = next(items)
        default = field(child, "value")
        if default is not None and not _is_value(default):
            return None
        declared.append(_declared(item))
        passed.append(_passed(item, by_name=by_name))
        by_name = by_name or item.further is ContainerKind.POSITIONAL
    body = "".join(f"    {line}\n" if line else "\n" for line in dispatch.rstrip("\n").split("\n"))
    return f"def forward({', '.join(declared)}):\n{body}    return super().forward({', '.join(passed)})\n"


def _is_value(default: Node) -> bool:
    return all(node.type in VALUES | INSIDE_STRINGS for node in walk(default))


def _declared(item: Parameter) -> str:
    if item.further is not None:
        return f"{_stars(item)}{item.name}"
    return f"{item.name}={item.default}" if item.has_default else item.name


def _passed(item: Parameter, *, by_name: bool) -> str:
    if item.further is not None:
        return f"{_stars(item)}{item.name}"
    return f"{item.name}={item.name}" if by_name else item.name


def _stars(item: Parameter) -> str:
    return "*" if item.further is ContainerKind.POSITIONAL else "**"


def method_edit(text: bytes, node: Node, method: bytes, newline: bytes) -> Edit | None:
    """Insert a method at the beginning of a class, with an empty line; ``None`` if the class has no line for it."""
    place = _place(text, node)
    if place is None:
        return None
    at, follows_docstring = place
    return Edit(at, at, newline + method if follows_docstring else method + newline)


def indent_of(text: bytes, node: Node) -> bytes:
    """The indentation of the first statement of a class."""
    body = field(node, "body")
    return text[line_start(text, body.start_byte) : body.start_byte] if body is not None else b""


def method_removal(text: bytes, start: int, end: int) -> Edit:
    """The inverse of :func:`method_edit` for the lines of the method."""
    above = line_start(text, start - 1)
    if not text[above:start].strip():
        return Edit(above, end, b"")
    return Edit(start, line_end(text, end), b"")


def _place(text: bytes, node: Node) -> tuple[int, bool] | None:
    """Where the first method of a class begins, and whether it follows the class's docstring."""
    body = field(node, "body")
    statements = [child for child in body.named_children if child.type != "comment"] if body is not None else []
    header = next((child for child in reversed(node.children) if child.type == ":"), None)
    if not statements or header is None or statements[0].start_point[0] == header.end_point[0]:
        return None
    first, *others = statements
    has_docstring = is_docstring(first)
    if has_docstring and others and others[0].start_point[0] == first.end_point[0]:
        return None
    at = line_end(text, (first if has_docstring else header).end_byte)
    # At the end of the file, the method would be behind the generated block.
    return (at, has_docstring) if text[at:].strip() else None
