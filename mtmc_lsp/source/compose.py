"""Put generated code into a file and take it out again, leaving every other byte alone.

What is put in is recognised by its marks: ``# mtmc: begin NAME`` and ``# mtmc: end NAME`` around the block above the
target, ``# mtmc: dispatch`` behind the first line of the dispatch statement, and ``# mtmc: import`` behind each import
that the file lacked. Such an import belongs to every block that uses it, and goes when the last of these goes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode
from mtmc_lsp.core.workload import Target
from mtmc_lsp.source.files import unified_diff, write_if_unchanged
from mtmc_lsp.source.imports import above, import_place, imported, missing_imports
from mtmc_lsp.source.syntax import (
    field,
    is_docstring,
    line_end,
    line_of,
    line_start,
    parse,
    parse_apart,
    text_of,
    undecorated,
    walk,
)
from mtmc_lsp.source.targets import definitions, find_definition

__all__ = ["compose", "strip_generated", "unified_diff", "write_if_unchanged"]

BEGIN, END = "# mtmc: begin", "# mtmc: end"
IMPORT, DISPATCH = "# mtmc: import", "# mtmc: dispatch"
ONE_LINE = "  # the body stood on the line of the def"
"""Behind the mark of a dispatch statement whose target had to be given lines for its body."""
BLANK = rb"(?:[ \t]*(?:\r\n|\n))"
MARGIN = rb"(?:^|(?<=\xef\xbb\xbf))"
"""Where a line starts, behind a byte order mark too."""


@dataclass(frozen=True)
class _Edit:
    """Bytes that take the place of others."""

    start: int
    end: int
    new: bytes


def compose(text: bytes, target: Target, code: GeneratedCode) -> bytes:
    """``text`` with the generated code in place; all other bytes are as they were.

    Args:
        text: the file, without generated code for this target.
        target: what is optimised; for a module the dispatch statement goes into its ``forward``.
        code: what is put in. Imports that the code does not use are left out.

    Raises:
        RequestError: a name that the code needs means something else in the file.
        TargetUnsupported: there is no place for a dispatch statement in the target.
    """
    if any(_block(name).search(text) for name in _same_code(target.qualname)):
        raise ValueError(f"{target.qualname} has generated code already: strip_generated takes it out")
    node = find_definition(text, target.path, target.qualname).node
    root, _ = parse_apart(text)
    newline = _newline(text)
    at_block = above(text, root, _outermost(node))
    used = tuple(s for s in code.imports if _is_used(s.encode(), f"{code.block}\n{code.dispatch}".encode()))
    edits = [
        *_import_edit(text, root, missing_imports(root, target.path, used, at_block), newline),
        _Edit(at_block, at_block, _framed(target.qualname, code.block, newline)),
        _dispatch_edit(text, _runs(node, target), target, code.dispatch, newline),
    ]
    for edit in reversed(edits):
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def strip_generated(text: bytes, qualname: str) -> bytes:
    """The exact inverse of :func:`compose`; text without generated code of this target comes back as it is.

    A class and its ``forward`` are the same code, so naming either takes out what was generated for the other.
    """
    for name in _same_code(qualname):
        found = _block(name).search(text)
        if found is not None:
            text = text[: found.start()] + text[found.end() :]
            text = _without_dispatch(text, qualname, found[0])
            text = _without_imports(text)
    return text


def _same_code(qualname: str) -> tuple[str, ...]:
    other = qualname.removesuffix(".forward") if qualname.endswith(".forward") else f"{qualname}.forward"
    return (qualname, other)


def _newline(text: bytes) -> bytes:
    first = text.find(b"\n")
    return b"\r\n" if first > 0 and text[first - 1 : first] == b"\r" else b"\n"


def _outermost(node: Node) -> Node:
    """The top-level statement that holds ``node``."""
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return node


def _framed(qualname: str, block: str, newline: bytes) -> bytes:
    lines = [f"{BEGIN} {qualname}", *block.rstrip("\n").split("\n"), f"{END} {qualname}", "", "", ""]
    return newline.join(line.encode() for line in lines)


def _block(qualname: str) -> re.Pattern[bytes]:
    """The block of a target with the two empty lines behind it (fewer, where the user took some away)."""
    begin, end, name = BEGIN.encode(), END.encode(), re.escape(qualname.encode())
    return re.compile(
        MARGIN + begin + b" " + name + BLANK + rb"(?:.*\n)*?" + end + b" " + name + BLANK + BLANK + b"{0,2}",
        re.MULTILINE,
    )


def _import_edit(text: bytes, root: Node, statements: list[str], newline: bytes) -> list[_Edit]:
    if not statements:
        return []
    place = import_place(text, root)
    lines = b"".join(f"{statement}  {IMPORT}".encode() + newline for statement in statements)
    return [_Edit(place.offset, place.offset, newline * place.blank_before + lines + newline * place.blank_after)]


def _runs(node: Node, target: Target) -> Node:
    """The function that runs: for a module class its ``forward``."""
    if node.type == "function_definition":
        return node
    body = field(node, "body")
    for inner in (undecorated(child) for child in (body.children if body is not None else [])):
        if inner.type == "function_definition" and text_of(field(inner, "name")) == "forward":
            return inner
    raise TargetUnsupported(
        f"{target.qualname} has no forward of its own",
        where=Location(target.path, target.start_line),
        remedy="Choose the class that defines forward.",
    )


def _dispatch_edit(text: bytes, function: Node, target: Target, dispatch: str, newline: bytes) -> _Edit:
    """The dispatch statement as the first of the body, behind its docstring, indented as the body is."""
    body = field(function, "body")
    statements = [child for child in body.named_children if child.type != "comment"] if body is not None else []
    if not statements:
        raise _no_place("has no body", function, target)
    header = next(child for child in reversed(function.children) if child.type == ":")
    own = text[line_start(text, function.start_byte) : function.start_byte]
    first = statements[0]
    if first.start_point[0] == header.end_point[0] or text[header.end_byte : first.start_byte].startswith(b" \\"):
        return _one_line_edit(text, own, header, first, target, dispatch, newline)
    indent = text[line_start(text, first.start_byte) : first.start_byte]
    behind = header
    if is_docstring(first):
        if len(statements) == 1:
            raise _no_place("has nothing but a docstring", first, target)
        if statements[1].start_point[0] == first.end_point[0]:
            raise _no_place("has a statement on the last line of its docstring", first, target)
        behind = first
    step = indent[len(own) :] if indent.startswith(own) and len(indent) > len(own) else b"    "
    at = line_end(text, behind.end_byte)
    return _Edit(at, at, _indented(dispatch, indent, step, newline))


def _one_line_edit(
    text: bytes, own: bytes, header: Node, first: Node, target: Target, dispatch: str, newline: bytes
) -> _Edit:
    """``def f(x): return x`` is given lines for its body; the mark says so, for the way back."""
    if text[header.end_byte : first.start_byte] != b" ":
        raise _no_place("has its body on the line of its def", header, target)
    if is_docstring(first):
        raise _no_place("has its docstring on the line of its def", first, target)
    step = b"\t" if own.endswith(b"\t") else b"    "
    head, _, rest = dispatch.rstrip("\n").partition("\n")
    rendered = _indented(f"{head}\n{rest}", own + step, step, newline, ONE_LINE)
    return _Edit(header.end_byte, first.start_byte, newline + rendered + own + step)


def _no_place(what: str, node: Node, target: Target) -> TargetUnsupported:
    return TargetUnsupported(
        f"{target.qualname} {what}, so there is no place for the kernel's call",
        where=Location(target.path, line_of(node)),
        remedy="Put each statement of the body on a line of its own.",
    )


def _indented(dispatch: str, indent: bytes, step: bytes, newline: bytes, remark: str = "") -> bytes:
    """The statement with its mark; each four spaces of its own indentation become one ``step``."""
    lines = dispatch.rstrip("\n").split("\n")
    lines[0] += f"  {DISPATCH}{remark}"
    rendered = b""
    for line in lines:
        inner = line.lstrip(" ")
        depth, rest = divmod(len(line) - len(inner), 4)
        rendered += indent + step * depth + b" " * rest + inner.encode() + newline
    return rendered


def _without_dispatch(text: bytes, qualname: str, block: bytes) -> bytes:
    """Without the dispatch statement that calls what the block defined."""
    marks = _dispatch_marks(parse(text))
    inside = [
        mark
        for item in definitions(text, "")
        if item.target.qualname in _same_code(qualname)
        for mark in marks
        if item.node.start_byte <= mark.start_byte < item.node.end_byte
    ]
    names = re.findall(rb"^(?:def|class) (\w+)|^(\w+) *=", block, re.MULTILINE)
    calls = re.compile(rb"\b(?:" + b"|".join(a or b for a, b in names) + rb")\b")
    calling = [mark for mark in (*inside, *marks) if names and calls.search(text[slice(*_span(text, mark))])]
    found = next(iter(calling or inside), None)
    if found is None:
        return text
    start, end = _span(text, found)
    body = _statement(found).parent
    rows = {child.start_point[0] for child in (body.children if body is not None else []) if child.type != "comment"}
    # Two rows: the dispatch statement's, and that of all the rest.
    if text_of(found).rstrip().endswith(ONE_LINE.strip()) and len(rows) == 2:
        start = text.rfind(b":", 0, start) + 1
        end += len(text[end:]) - len(text[end:].lstrip(b" \t"))
        return text[:start] + b" " + text[end:]
    return text[:start] + text[end:]


def _dispatch_marks(root: Node) -> list[Node]:
    return [item for item in walk(root) if item.type == "comment" and text_of(item).startswith(DISPATCH)]


def _statement(mark: Node) -> Node:
    """The whole statement that a dispatch mark stands in."""
    node = mark
    while node.parent is not None and node.parent.type not in ("block", "module"):
        node = node.parent
    return node


def _span(text: bytes, mark: Node) -> tuple[int, int]:
    """The lines of the statement that a dispatch mark stands in."""
    statement = _statement(mark)
    if statement.type != "ERROR" and not statement.has_error:
        return line_start(text, statement.start_byte), line_end(text, statement.end_byte - 1)
    # Broken code: what the parser takes for a statement may reach to the end of the file. Lines further in belong to it.
    start, end = line_start(text, mark.start_byte), line_end(text, mark.start_byte)
    depth = len(text[start:end]) - len(text[start:end].lstrip())
    while end < len(text):
        line = text[end : line_end(text, end)]
        if len(line) - len(line.lstrip()) <= depth or not line.strip():
            break
        end += len(line)
    return start, end


def _without_imports(text: bytes) -> bytes:
    """Without the imports that no block needs any more, and the empty lines put around the first of them."""
    marked = re.compile(MARGIN + rb"((?:import|from) .*?)[ \t]*" + IMPORT.encode() + BLANK, re.MULTILINE)
    generated = b"\n".join(
        [
            *re.findall(BEGIN.encode() + rb" (?:.*\n)*?" + END.encode(), text),
            *(text[slice(*_span(text, mark))] for mark in _dispatch_marks(parse(text))),
        ]
    )
    if not any(not _is_used(found[1], generated) for found in marked.finditer(text)):
        return text
    text = marked.sub(lambda found: found[0] if _is_used(found[1], generated) else b"", text)
    place = import_place(text, parse(text))
    if place.blank_before:
        blank = re.compile(BLANK).match(text, place.offset)
        return text[: place.offset] + text[blank.end() :] if blank else text
    blanks = re.search(BLANK + rb"{%d}\Z" % place.blank_after, text[: place.offset])
    return text[: blanks.start()] + text[place.offset :] if blanks and place.blank_after else text


def _is_used(statement: bytes, code: bytes) -> bool:
    """Whether code has one of the names that an import statement binds."""
    names = [name.encode() for child in parse(statement).children for name, _ in imported(child)]
    return any(re.search(rb"\b" + re.escape(name) + rb"\b", code) for name in names)
