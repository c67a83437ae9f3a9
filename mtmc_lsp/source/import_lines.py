"""The statements of mtmc among the imports at the top of a file, and the empty lines that were inserted with the first one."""

from __future__ import annotations

import re

from mtmc_lsp.source.blocks import BEGIN, BLANK, END, IMPORT, LINE_START
from mtmc_lsp.source.dispatch.marks import dispatch_marks, dispatch_span
from mtmc_lsp.source.dispatch.regions import Edit
from mtmc_lsp.source.imports import import_position, imported_names
from mtmc_lsp.source.syntax import parse, parse_with_recovery


def marked_import_edit(text: bytes, statements: list[str], newline: bytes) -> list[Edit]:
    """Insert imports that blocks share."""
    lines = b"".join(f"{statement}  {IMPORT}".encode() + newline for statement in statements)
    return [import_edit(text, lines, newline)] if statements else []


def import_edit(text: bytes, lines: bytes, newline: bytes, *, is_of_torch: bool = True) -> Edit:
    """Insert lines with imports, beside those of torch or after all."""
    position = import_position(text, parse_with_recovery(text)[0], is_of_torch=is_of_torch)
    return Edit(
        position.offset, position.offset, newline * position.blank_before + lines + newline * position.blank_after
    )


def without_unused_imports(text: bytes, *, has_gap: bool = True) -> bytes:
    """Remove imports that no block needs any more.

    Args:
        has_gap: whether :func:`import_edit` inserted empty lines with the first one, which are removed with the last one.
    """
    marked = re.compile(LINE_START + rb"((?:import|from) .*?)[ \t]*" + IMPORT.encode() + BLANK, re.MULTILINE)
    generated = b"\n".join(
        [
            *re.findall(BEGIN.encode() + rb" (?:.*\n)*?" + END.encode(), text),
            *(text[slice(*dispatch_span(text, mark))] for mark in dispatch_marks(parse(text))),
        ]
    )
    if not any(not is_used(match[1], generated) for match in marked.finditer(text)):
        return text
    changed = marked.sub(lambda match: match[0] if is_used(match[1], generated) else b"", text)
    return without_import_gap(changed) if has_gap else changed


def without_import_gap(text: bytes) -> bytes:
    """Remove the empty lines that :func:`import_edit` adds, after its lines were removed."""
    position = import_position(text, parse(text))
    if position.blank_before:
        blank = re.compile(BLANK).match(text, position.offset)
        return text[: position.offset] + text[blank.end() :] if blank else text
    blanks = re.search(BLANK + rb"{%d}\Z" % position.blank_after, text[: position.offset])
    return text[: blanks.start()] + text[position.offset :] if blanks and position.blank_after else text


def is_used(statement: bytes, code: bytes) -> bool:
    """Whether the code uses one of the names that an import statement binds."""
    names = [name.encode() for child in parse(statement).children for name, _ in imported_names(child)]
    return any(re.search(rb"\b" + re.escape(name) + rb"\b", code) for name in names)
