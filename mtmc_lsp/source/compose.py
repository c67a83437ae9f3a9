"""Insert generated code into a file and remove it again, without changing any other byte.

Inserted code is recognised by markers: ``# mtmc: begin NAME`` and ``# mtmc: end NAME`` around the block, and ``# mtmc: dispatch``
at the end of the first line of each dispatch statement. A block at the end of the file contains the imports that the file does
not have. A block above its target has them at the top of the file, each with ``# mtmc: import``: such an import is shared by all
blocks that use it, and is removed with the last of them.
"""

from __future__ import annotations

import re

from tree_sitter import Node

from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode, Placement
from mtmc_lsp.core.workload import Target
from mtmc_lsp.source.blocks import (
    BEGIN,
    BLANK,
    END,
    IMPORT,
    LINE_START,
    find_block,
    framed,
    remove_block,
    with_gap,
    without_blocks,
)
from mtmc_lsp.source.dispatch.lambdas import lambda_edit, without_lambda_dispatch
from mtmc_lsp.source.dispatch.regions import Edit, region_edits, region_place, without_region_dispatch
from mtmc_lsp.source.files import unified_diff, write_if_unchanged
from mtmc_lsp.source.import_time import first_caller
from mtmc_lsp.source.imports import (
    check_names_are_free,
    first_on_line,
    import_position,
    imported_names,
    missing_imports,
    statement_start,
)
from mtmc_lsp.source.line_wrapping import MAX_LINE, wrapped
from mtmc_lsp.source.syntax import (
    field,
    is_docstring,
    line_end,
    line_of,
    line_start,
    parse,
    parse_with_recovery,
    text_of,
    undecorated,
    walk,
)
from mtmc_lsp.source.targets import definitions, find_definition

__all__ = ["compose", "strip_generated", "unified_diff", "write_if_unchanged"]

DISPATCH = "# mtmc: dispatch"
ONE_LINE_NOTE = "  # the body stood on the line of the def"
"""Added to the dispatch marker if the body was on the line of the ``def`` and had to be moved to a new line."""


def compose(text: bytes, target: Target, code: GeneratedCode) -> bytes:
    """Insert the generated code into ``text``; all other bytes stay the same.

    Args:
        text: the file, without generated code for this target.
        target: the optimised target. For a module, the dispatch statement goes into its ``forward``.
        code: the code to insert. Imports that it does not use are skipped.

    Raises:
        RequestError: the file uses a name that the code needs for something else.
        TargetUnsupported: a dispatch statement cannot be inserted into the target.
    """
    if any(find_block(text, name) for name in _same_code(target.qualname)):
        raise ValueError(f"{target.qualname} already has generated code: remove it with strip_generated")
    # Names in generated blocks do not count: each block can be removed without the others.
    plain = without_blocks(text, marked_imports=False)
    node = find_definition(plain, target.path, target.qualname).node
    root, _ = parse_with_recovery(plain)
    newline = _newline(text)
    dispatches = [code.dispatch, *(dispatch for _, dispatch in code.regions)]
    required = tuple(s for s in code.imports if _is_used(s.encode(), "\n".join([code.block, *dispatches]).encode()))
    check_names_are_free(root, target.path, code.block)
    statement = _outermost(node)
    caller = first_caller(root, statement)
    at_top: list[str] = []
    if code.place is Placement.ABOVE or caller == statement:
        offset = statement_start(plain, root, statement)
        at_top, in_block = missing_imports(root, target.path, required, offset), []
    else:
        offset = len(text) if caller is None else statement_start(plain, root, first_on_line(caller))
        unmarked, _ = parse_with_recovery(without_blocks(text, marked_imports=True))
        in_block = missing_imports(unmarked, target.path, required, offset)
    block = framed(target.qualname, in_block, code.block, newline)
    # Of two insertions at the same offset, the imports come last, which puts them first.
    edits = [
        *_dispatch_edits(text, _entry_function(node, target), target, code, newline),
        Edit(offset, offset, with_gap(text, offset, block, newline)),
        *_import_edit(text, at_top, newline),
    ]
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def strip_generated(text: bytes, qualname: str) -> bytes:
    """Exact inverse of :func:`compose`. Text without generated code for this target is returned unchanged.

    A class and its ``forward`` share their generated code, so either name removes it.
    """
    for name in _same_code(qualname):
        span = find_block(text, name)
        if span is not None:
            block = text[span.start : span.end]
            text = _without_dispatch(remove_block(text, span), qualname, block)
            text = _without_imports(text)
    return text


def _same_code(qualname: str) -> tuple[str, ...]:
    alternative = qualname.removesuffix(".forward") if qualname.endswith(".forward") else f"{qualname}.forward"
    return (qualname, alternative)


def _newline(text: bytes) -> bytes:
    first = text.find(b"\n")
    return b"\r\n" if first > 0 and text[first - 1 : first] == b"\r" else b"\n"


def _outermost(node: Node) -> Node:
    """The top-level statement that contains ``node``."""
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return node


def _import_edit(text: bytes, statements: list[str], newline: bytes) -> list[Edit]:
    if not statements:
        return []
    position = import_position(text, parse_with_recovery(text)[0])
    lines = b"".join(f"{statement}  {IMPORT}".encode() + newline for statement in statements)
    return [
        Edit(position.offset, position.offset, newline * position.blank_before + lines + newline * position.blank_after)
    ]


def _entry_function(node: Node, target: Target) -> Node:
    """The function to optimise: for a module class its ``forward``."""
    if node.type in ("function_definition", "lambda"):
        return node
    body = field(node, "body")
    for inner in (undecorated(child) for child in (body.children if body is not None else [])):
        if inner.type == "function_definition" and text_of(field(inner, "name")) == "forward":
            return inner
    raise TargetUnsupported(
        f"{target.qualname} does not define forward",
        where=Location(target.path, target.start_line),
        remedy="Select the class that defines forward.",
    )


def _dispatch_edits(text: bytes, function: Node, target: Target, code: GeneratedCode, newline: bytes) -> list[Edit]:
    """Insert the dispatch statements: one for the whole body, or one for each region."""
    edits = []
    for region, dispatch in code.regions or [(target.region, code.dispatch)]:
        if function.type == "lambda":
            edit = lambda_edit(text, function, dispatch, DISPATCH, newline)
            if edit is None:
                raise _cannot_insert("is a lambda expression with a nested result", function, target, AS_FUNCTION)
            edits.append(edit)
            continue
        if region is None:
            edits.append(_dispatch_edit(text, function, target, dispatch, newline))
            continue
        place = region_place(text, function, region)
        if place is None:
            where = Location(target.path, region.start_line)
            raise _cannot_insert("has several statements on a line", where, target)
        indented = _indent_dispatch(dispatch, place.indent, place.step, newline)
        edits += region_edits(text, place, region, indented, newline)
    return edits


def _dispatch_edit(text: bytes, function: Node, target: Target, dispatch: str, newline: bytes) -> Edit:
    """Insert the dispatch statement at the start of the body, after its docstring, with the body's indentation."""
    body = field(function, "body")
    statements = [child for child in body.named_children if child.type != "comment"] if body is not None else []
    if not statements:
        raise _cannot_insert("has no body", function, target)
    header = next(child for child in reversed(function.children) if child.type == ":")
    function_indent = text[line_start(text, function.start_byte) : function.start_byte]
    first = statements[0]
    if first.start_point[0] == header.end_point[0] or text[header.end_byte : first.start_byte].startswith(b" \\"):
        return _one_line_edit(text, function_indent, header, first, target, dispatch, newline)
    indent = text[line_start(text, first.start_byte) : first.start_byte]
    previous = header
    if is_docstring(first):
        if len(statements) == 1:
            raise _cannot_insert("contains only a docstring", first, target)
        if statements[1].start_point[0] == first.end_point[0]:
            raise _cannot_insert("has a statement on the last line of its docstring", first, target)
        previous = first
    step = (
        indent[len(function_indent) :]
        if indent.startswith(function_indent) and len(indent) > len(function_indent)
        else b"    "
    )
    at = line_end(text, previous.end_byte)
    return Edit(at, at, _indent_dispatch(dispatch, indent, step, newline))


def _one_line_edit(
    text: bytes, function_indent: bytes, header: Node, first: Node, target: Target, dispatch: str, newline: bytes
) -> Edit:
    """Move the body of ``def f(x): return x`` to a new line. The marker records this so that it can be undone."""
    if text[header.end_byte : first.start_byte] != b" ":
        raise _cannot_insert("has its body on the line of its def", header, target)
    if is_docstring(first):
        raise _cannot_insert("has its docstring on the line of its def", first, target)
    step = b"\t" if function_indent.endswith(b"\t") else b"    "
    rendered = _indent_dispatch(dispatch, function_indent + step, step, newline, ONE_LINE_NOTE)
    return Edit(header.end_byte, first.start_byte, newline + rendered + function_indent + step)


OWN_LINES = "Put each statement of the body on a separate line."
AS_FUNCTION = "Write it as a function with def."


def _cannot_insert(problem: str, where: Node | Location, target: Target, remedy: str = OWN_LINES) -> TargetUnsupported:
    return TargetUnsupported(
        f"{target.qualname} {problem}, so the kernel's call cannot be inserted",
        where=where if isinstance(where, Location) else Location(target.path, line_of(where)),
        remedy=remedy,
    )


def _indent_dispatch(dispatch: str, indent: bytes, step: bytes, newline: bytes, note: str = "") -> bytes:
    """Add the marker, wrap and indent the statement; each four spaces of its indentation become one ``step``."""
    head, _, body = dispatch.rstrip("\n").partition("\n")
    marked = f"{head}  {DISPATCH}{note}\n{body}"
    rendered = b""
    for line in wrapped(marked, MAX_LINE - len(indent.expandtabs(4))).split("\n"):
        inner = line.lstrip(" ")
        depth, rest = divmod(len(line) - len(inner), 4)
        rendered += indent + step * depth + b" " * rest + inner.encode() + newline
    return rendered


def _without_dispatch(text: bytes, qualname: str, block: bytes) -> bytes:
    """Remove the dispatch statements that call functions of the block."""
    names = re.findall(rb"^(?:def|class) (\w+)|^(\w+) *=", block, re.MULTILINE)
    calls = re.compile(rb"\b(?:" + b"|".join(a or b for a, b in names) + rb")\b")
    root = parse(text)
    marks = _dispatch_marks(root)
    marks_in_target = [
        mark
        for item in definitions(text, "")
        if item.target.qualname in _same_code(qualname)
        for mark in marks
        if item.node.start_byte <= mark.start_byte < item.node.end_byte
    ]
    calling_marks = [mark for mark in marks if names and calls.search(_generated_part(text, mark))]
    # From the last one, so that the offsets of the others stay valid.
    for mark in reversed(calling_marks or marks_in_target[:1]):
        edit = _removal(text, mark)
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def _removal(text: bytes, mark: Node) -> Edit:
    """The edit that removes a dispatch statement."""
    restored = without_lambda_dispatch(text, mark) or without_region_dispatch(text, _statement(mark))
    if restored is not None:
        return restored
    start, end = _span(text, mark)
    body = _statement(mark).parent
    rows = {child.start_point[0] for child in (body.children if body is not None else []) if child.type != "comment"}
    # Two rows: one for the dispatch statement, one for the original body.
    if text_of(mark).rstrip().endswith(ONE_LINE_NOTE.strip()) and len(rows) == 2:
        start = text.rfind(b":", 0, start) + 1
        end += len(text[end:]) - len(text[end:].lstrip(b" \t"))
        return Edit(start, end, b" ")
    return Edit(start, end, b"")


def _generated_part(text: bytes, mark: Node) -> bytes:
    """The text of a dispatch statement without the user's statements in its ``else`` branch."""
    start, end = _span(text, mark)
    branch = field(_statement(mark), "alternative")
    return text[start : end if branch is None else branch.start_byte]


def _dispatch_marks(root: Node) -> list[Node]:
    return [item for item in walk(root) if item.type == "comment" and text_of(item).startswith(DISPATCH)]


def _statement(mark: Node) -> Node:
    """The complete statement that contains a dispatch marker."""
    node = mark
    while node.parent is not None and node.parent.type not in ("block", "module"):
        node = node.parent
    return node


def _span(text: bytes, mark: Node) -> tuple[int, int]:
    """Byte range of the lines of the statement that contains a dispatch marker."""
    statement = _statement(mark)
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


def _without_imports(text: bytes) -> bytes:
    """Remove imports that no block needs any more, and the empty lines that were inserted with the first one."""
    marked = re.compile(LINE_START + rb"((?:import|from) .*?)[ \t]*" + IMPORT.encode() + BLANK, re.MULTILINE)
    generated = b"\n".join(
        [
            *re.findall(BEGIN.encode() + rb" (?:.*\n)*?" + END.encode(), text),
            *(text[slice(*_span(text, mark))] for mark in _dispatch_marks(parse(text))),
        ]
    )
    if not any(not _is_used(match[1], generated) for match in marked.finditer(text)):
        return text
    text = marked.sub(lambda match: match[0] if _is_used(match[1], generated) else b"", text)
    position = import_position(text, parse(text))
    if position.blank_before:
        blank = re.compile(BLANK).match(text, position.offset)
        return text[: position.offset] + text[blank.end() :] if blank else text
    blanks = re.search(BLANK + rb"{%d}\Z" % position.blank_after, text[: position.offset])
    return text[: blanks.start()] + text[position.offset :] if blanks and position.blank_after else text


def _is_used(statement: bytes, code: bytes) -> bool:
    """Whether the code uses one of the names that an import statement binds."""
    names = [name.encode() for child in parse(statement).children for name, _ in imported_names(child)]
    return any(re.search(rb"\b" + re.escape(name) + rb"\b", code) for name in names)
