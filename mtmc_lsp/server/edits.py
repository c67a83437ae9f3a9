"""Minimal edits between two texts of a document: cursors, folds and marks on unchanged lines stay in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lsprotocol import types as lsp

from mtmc_lsp.server.text import ERRORS, Document, Text

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server

ANNOTATION = "mtmc"
MAX_CHANGED_LINES = 1200
"""Maximum number of changed lines for which the smallest edits are computed."""


def minimal_edits(text: Text, new: bytes) -> list[lsp.TextEdit]:
    """The edits that change ``text`` to ``new``."""
    old_lines, new_lines = text.data.splitlines(keepends=True), new.splitlines(keepends=True)
    prefix = _common_prefix(old_lines, new_lines)
    suffix = _common_prefix(old_lines[prefix:][::-1], new_lines[prefix:][::-1])
    middle_old = old_lines[prefix : len(old_lines) - suffix]
    middle_new = new_lines[prefix : len(new_lines) - suffix]
    starts = [sum(map(len, old_lines[:prefix]))]
    for line in middle_old:
        starts.append(starts[-1] + len(line))
    return [
        _edit(text, starts[a], starts[b], b"".join(middle_new[c:d]))
        for a, b, c, d in changed_lines(middle_old, middle_new)
    ]


def _edit(text: Text, start: int, end: int, new: bytes) -> lsp.TextEdit:
    """The edit that replaces bytes of ``text``. Lines that follow the last line are inserted at that line's end.

    Neovim 0.11 adds an empty line where an edit starts below the last line.
    """
    newline = next((ending for ending in (b"\r\n", b"\n", b"\r") if text.data.endswith(ending)), b"")
    if start == end == len(text.data) and newline and new.endswith(newline):
        start = end = len(text.data) - len(newline)
        new = newline + new[: -len(newline)]
    return lsp.TextEdit(text.range(start, end), new.decode("utf-8", ERRORS))


def changed_lines(old: Sequence[bytes], new: Sequence[bytes]) -> list[tuple[int, int, int, int]]:
    """The ranges ``old[a:b]`` and ``new[c:d]`` that differ, in order, as few lines as possible.

    Myers' algorithm: its time grows with the number of changes, and for an equal number not with repeated lines as in difflib.
    With more than ``MAX_CHANGED_LINES`` the two texts are one range.
    """
    furthest, history = {1: 0}, list[dict[int, int]]()
    for distance in range(MAX_CHANGED_LINES + 1):
        history.append(dict(furthest))
        for diagonal in range(-distance, distance + 1, 2):
            down = diagonal == -distance or (diagonal != distance and furthest[diagonal - 1] < furthest[diagonal + 1])
            x = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
            y = x - diagonal
            while x < len(old) and y < len(new) and old[x] == new[y]:
                x, y = x + 1, y + 1
            furthest[diagonal] = x
            if x >= len(old) and y >= len(new):
                return _ranges(history, len(old), len(new))
    return [(0, len(old), 0, len(new))]


def _ranges(history: Sequence[dict[int, int]], x: int, y: int) -> list[tuple[int, int, int, int]]:
    """Follow the shortest path backwards; adjacent changes become one range."""
    ranges: list[tuple[int, int, int, int]] = []
    for distance in range(len(history) - 1, 0, -1):
        furthest, diagonal = history[distance], x - y
        down = diagonal == -distance or (diagonal != distance and furthest[diagonal - 1] < furthest[diagonal + 1])
        before = diagonal + 1 if down else diagonal - 1
        start_x, start_y = furthest[before], furthest[before] - before
        end_x, end_y = (start_x, start_y + 1) if down else (start_x + 1, start_y)
        if ranges and (ranges[-1][0], ranges[-1][2]) == (end_x, end_y):
            _, end_x, _, end_y = ranges.pop()
        ranges.append((start_x, end_x, start_y, end_y))
        x, y = start_x, start_y
    return ranges[::-1]


def _common_prefix(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Number of equal lines at the start."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def workspace_edit(
    ls: Server, document: Document, edits: Sequence[lsp.TextEdit], *, label: str = "", confirm: bool = False
) -> lsp.WorkspaceEdit:
    """A workspace edit of one document, with version and label if the client supports them.

    Args:
        label: description of the change, for clients that show it.
        confirm: whether the client asks the user for confirmation.
    """
    workspace = ls.client_capabilities.workspace
    support = workspace.workspace_edit if workspace is not None else None
    if support is None or not support.document_changes:
        return lsp.WorkspaceEdit(changes={document.uri: list(edits)})
    versioned = lsp.OptionalVersionedTextDocumentIdentifier(document.uri, document.version)
    if not label or support.change_annotation_support is None:
        return lsp.WorkspaceEdit(document_changes=[lsp.TextDocumentEdit(versioned, list(edits))])
    annotated = [lsp.AnnotatedTextEdit(annotation_id=ANNOTATION, range=e.range, new_text=e.new_text) for e in edits]
    return lsp.WorkspaceEdit(
        document_changes=[lsp.TextDocumentEdit(versioned, annotated)],
        change_annotations={ANNOTATION: lsp.ChangeAnnotation(label, needs_confirmation=confirm)},
    )


async def apply_text(ls: Server, document: Document, new: bytes, label: str, *, confirm: bool = False) -> bool:
    """Ask the client to change the text of a document to ``new``. Returns whether it did."""
    edits = minimal_edits(document.text, new)
    if not edits:
        return True
    return await applied(ls, workspace_edit(ls, document, edits, label=label, confirm=confirm), label, confirm=confirm)


async def applied(ls: Server, edit: lsp.WorkspaceEdit, label: str, *, confirm: bool = False) -> bool:
    """Ask the client to apply an edit. Returns whether it did; a refusal that the user did not choose is shown."""
    result = await ls.workspace_apply_edit_async(lsp.ApplyWorkspaceEditParams(edit, label))
    if not result.applied and not confirm:
        reason = f": {result.failure_reason}" if result.failure_reason else ""
        text = f"The editor did not apply the change ({label}){reason}. Nothing was changed; try again."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, text))
    return result.applied
