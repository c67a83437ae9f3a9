"""Insert generated code into a file and remove it again, without changing any other byte.

Inserted code is recognised by markers: ``# mtmc: begin NAME`` and ``# mtmc: end NAME`` around the block, and ``# mtmc: dispatch``
at the end of the first line of each dispatch statement. A block at the end of the file contains the imports that the file does
not have. A block above its target has them at the top of the file, each with ``# mtmc: import``: such an import is shared by all
blocks that use it, and is removed with the last of them. A block may also be in the file beside this one, from which one import
with ``# mtmc: kernels`` takes the names for the dispatch statements (``source/sibling/``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode, Placement
from mtmc_lsp.core.workload import Target
from mtmc_lsp.source.blocks import (
    find_block,
    framed,
    newline_of,
    remove_block,
    with_gap,
    without_blocks,
)
from mtmc_lsp.source.dispatch.inherited import indent_of, inherited_method, method_edit, method_removal
from mtmc_lsp.source.dispatch.lambdas import lambda_edit, without_lambda_dispatch
from mtmc_lsp.source.dispatch.marks import (
    DISPATCH,
    dispatch_marks,
    dispatch_span,
    generated_part,
    owner_of,
    statement_of,
)
from mtmc_lsp.source.dispatch.regions import Edit, region_edits, region_place, without_region_dispatch
from mtmc_lsp.source.files import unified_diff, write_if_unchanged
from mtmc_lsp.source.import_lines import is_used, marked_import_edit, without_unused_imports
from mtmc_lsp.source.import_time import first_caller
from mtmc_lsp.source.imports import (
    check_names_are_free,
    first_on_line,
    missing_imports,
    statement_start,
)
from mtmc_lsp.source.line_wrapping import MAX_LINE, wrapped
from mtmc_lsp.source.sibling.statement import find_kernel_import, with_kernel_import
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
)
from mtmc_lsp.source.targets import definitions, find_definition

__all__ = ["compose", "strip_generated", "unified_diff", "write_if_unchanged"]

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
    if any(find_block(text, name) for name in same_code(target.qualname)):
        raise ValueError(f"{target.qualname} already has generated code: remove it with strip_generated")
    # Names in generated blocks do not count: each block can be removed without the others.
    plain = without_blocks(text, marked_imports=False)
    node = find_definition(plain, target.path, target.qualname).node
    root, _ = parse_with_recovery(plain)
    newline = newline_of(text)
    dispatches = [code.dispatch, *(dispatch for _, dispatch in code.regions)]
    required = tuple(s for s in code.imports if is_used(s.encode(), "\n".join([code.block, *dispatches]).encode()))
    check_names_are_free(root, target.path, code.block)
    # Of two insertions at the same offset, the last one comes first in the text.
    edits = [
        *_dispatch_edits(text, plain, node, target, code, newline),
        *_block_edits(text, plain, target, required, code, newline),
    ]
    return edited(text, edits)


def insert_block(text: bytes, target: Target, code: GeneratedCode) -> bytes:
    """Insert the block of a target that has its dispatch statements already."""
    plain = without_blocks(text, marked_imports=False)
    required = tuple(s for s in code.imports if is_used(s.encode(), code.block.encode()))
    return edited(text, _block_edits(text, plain, target, required, code, newline_of(text)))


def _block_edits(
    text: bytes, plain: bytes, target: Target, required: tuple[str, ...], code: GeneratedCode, newline: bytes
) -> list[Edit]:
    """Insert the block and the imports that it needs.

    Args:
        plain: ``text`` with spaces in place of other blocks.
    """
    root, _ = parse_with_recovery(plain)
    statement = _outermost(find_definition(plain, target.path, target.qualname).node)
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
    return [Edit(offset, offset, with_gap(text, offset, block, newline)), *marked_import_edit(text, at_top, newline)]


def edited(text: bytes, edits: Sequence[Edit]) -> bytes:
    """The text with edits that do not overlap."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def strip_generated(text: bytes, qualname: str) -> bytes:
    """Exact inverse of :func:`compose`. Text without generated code for this target is returned unchanged.

    A class and its ``forward`` share their generated code, so either name removes it.
    """
    for name in same_code(qualname):
        span = find_block(text, name)
        if span is not None:
            block = text[span.start : span.end]
            text = _without_dispatch(remove_block(text, span), qualname, block)
            text = without_unused_imports(text)
    return _without_imported_kernels(text, qualname)


def _without_imported_kernels(text: bytes, qualname: str) -> bytes:
    """Remove the dispatch statements that call kernels in the file beside this one, and what the import has for them alone."""
    kernels = find_kernel_import(text)
    marks = own_dispatches(text, qualname) if kernels is not None else []
    removed = [mark for mark in marks if kernels is not None and kernels.names_in(generated_part(text, mark))]
    if kernels is None or not removed:
        return text
    text = edited(text, [_removal(text, mark) for mark in removed])
    remaining = b"\n".join(generated_part(text, mark) for mark in dispatch_marks(parse(text)))
    return without_unused_imports(with_kernel_import(text, kernels.module, kernels.names_in(remaining)))


def own_dispatches(text: bytes, qualname: str) -> list[Node]:
    """The dispatch marks in a target itself, not in functions inside it."""
    return [mark for mark in dispatch_marks(parse(text)) if owner_of(mark) in same_code(qualname)]


def same_code(qualname: str) -> tuple[str, ...]:
    """The names of a target: a class and its ``forward`` share their generated code."""
    alternative = qualname.removesuffix(".forward") if qualname.endswith(".forward") else f"{qualname}.forward"
    return (qualname, alternative)


def _outermost(node: Node) -> Node:
    """The top-level statement that contains ``node``."""
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return node


def _entry_function(node: Node) -> Node | None:
    """The function to optimise: for a module class its ``forward``; ``None`` if the class inherits it."""
    if node.type in ("function_definition", "lambda"):
        return node
    body = field(node, "body")
    for inner in (undecorated(child) for child in (body.children if body is not None else [])):
        if inner.type == "function_definition" and text_of(field(inner, "name")) == "forward":
            return inner
    return None


def _inherited_edit(text: bytes, plain: bytes, node: Node, target: Target, code: GeneratedCode, newline: bytes) -> Edit:
    """Insert a ``forward`` with the dispatch into a class that inherits it.

    Raises:
        TargetUnsupported: the file does not define that ``forward``, or the method cannot be written.
    """
    method = None if code.regions or target.region else inherited_method(plain, target, code.dispatch)
    indent = indent_of(text, node)
    step = indent[len(text[line_start(text, node.start_byte) : node.start_byte]) :] or b"    "
    rendered = None if method is None else _indent_dispatch(method, indent, step, newline)
    edit = None if rendered is None else method_edit(text, node, rendered, newline)
    if edit is None:
        raise TargetUnsupported(
            f"{target.qualname} does not define forward, and no forward can be written that calls the inherited one",
            where=Location(target.path, target.start_line),
            remedy="Select the class that defines forward, or define forward in this class.",
        )
    return edit


def _dispatch_edits(
    text: bytes, plain: bytes, node: Node, target: Target, code: GeneratedCode, newline: bytes
) -> list[Edit]:
    """Insert the dispatch statements: one for the whole body, or one for each region."""
    function = _entry_function(node)
    if function is None:
        return [_inherited_edit(text, plain, node, target, code, newline)]
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
    marks = dispatch_marks(root)
    marks_in_target = [
        mark
        for item in definitions(text, "")
        if item.target.qualname in same_code(qualname)
        for mark in marks
        if item.node.start_byte <= mark.start_byte < item.node.end_byte
    ]
    calling_marks = [mark for mark in marks if names and calls.search(generated_part(text, mark))]
    # From the last one, so that the offsets of the others stay valid.
    for mark in reversed(calling_marks or marks_in_target[:1]):
        edit = _removal(text, mark)
        text = text[: edit.start] + edit.new + text[edit.end :]
    return text


def _removal(text: bytes, mark: Node) -> Edit:
    """The edit that removes a dispatch statement."""
    restored = without_lambda_dispatch(text, mark) or without_region_dispatch(text, statement_of(mark))
    if restored is not None:
        return restored
    start, end = dispatch_span(text, mark)
    if statement_of(mark).type == "function_definition":
        return method_removal(text, start, end)
    body = statement_of(mark).parent
    rows = {child.start_point[0] for child in (body.children if body is not None else []) if child.type != "comment"}
    # Two rows: one for the dispatch statement, one for the original body.
    if text_of(mark).rstrip().endswith(ONE_LINE_NOTE.strip()) and len(rows) == 2:
        start = text.rfind(b":", 0, start) + 1
        end += len(text[end:]) - len(text[end:].lstrip(b" \t"))
        return Edit(start, end, b" ")
    return Edit(start, end, b"")
