"""The import in the user's file of the kernels beside it: one statement for all targets, with ``# mtmc: kernels``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.source.blocks import newline_of
from mtmc_lsp.source.dispatch.regions import Edit
from mtmc_lsp.source.import_lines import import_edit, without_import_gap
from mtmc_lsp.source.imports import imported_names
from mtmc_lsp.source.line_wrapping import MAX_LINE
from mtmc_lsp.source.syntax import field, line_end, line_start, parse_with_recovery, text_of, walk

KERNELS = "# mtmc: kernels"
"""The mark on the first line of the import."""


@dataclass(frozen=True)
class KernelImport:
    """The marked import of a file."""

    start: int
    """Offset of its first line."""
    end: int
    """Offset after its last line."""
    module: str
    """``.model_kernels``."""
    names: tuple[str, ...]

    def names_in(self, text: bytes) -> tuple[str, ...]:
        """Those of its names that occur in a text."""
        words = set(re.findall(rb"\w+", text))
        return tuple(name for name in self.names if name.encode() in words)


def find_kernel_import(text: bytes) -> KernelImport | None:
    """The marked import; None if the file has none."""
    if KERNELS.encode() not in text:
        return None
    root, _ = parse_with_recovery(text)
    for mark in walk(root):
        if mark.type == "comment" and text_of(mark).startswith(KERNELS):
            statement = _statement(mark)
            if statement is not None:
                names = tuple(name for name, _ in imported_names(statement))
                start, end = line_start(text, statement.start_byte), line_end(text, statement.end_byte - 1)
                return KernelImport(start, end, text_of(field(statement, "module_name")), names)
    return None


def _statement(mark: Node) -> Node | None:
    """The import that a mark belongs to: the mark is inside its brackets, or at the end of its line."""
    inside = mark.parent
    previous = mark.prev_named_sibling
    for node in (inside, previous):
        if node is not None and node.type == "import_from_statement" and node.start_point[0] == mark.start_point[0]:
            return node
    return None


def with_kernel_import(text: bytes, module: str, names: Sequence[str], plain: bytes | None = None) -> bytes:
    """The file with an import of exactly these kernels; without names it has no such import.

    Args:
        plain: the file without dispatch statements, which tells where a new import goes; by default ``text``.
    """
    newline = newline_of(text)
    lines = newline.join(line.encode() for line in _lines(module, names)) if names else b""
    present = find_kernel_import(text)
    if present is None:
        position_text = text if plain is None else plain
        edit = import_edit(position_text, lines, newline, is_of_torch=False) if names else Edit(0, 0, b"")
        return text[: edit.start] + edit.new + text[edit.end :]
    changed = text[: present.start] + lines + text[present.end :]
    return changed if names else without_import_gap(changed)


def _lines(module: str, names: Sequence[str]) -> list[str]:
    """The lines of the import, as common formatters write it, and an empty text for its last line ending."""
    line = f"from {module} import {', '.join(names)}  {KERNELS}"
    if len(line) <= MAX_LINE:
        return [line, ""]
    return [f"from {module} import (  {KERNELS}", *(f"    {name}," for name in names), ")", ""]
