"""From one text of a document to another, as edits of the lines that differ: cursors, folds and marks elsewhere stay."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lsprotocol import types as lsp

from mtmc_lsp.server.text import ERRORS, Text

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Document, Server

ANNOTATION = "mtmc"


def minimal_edits(text: Text, new: bytes) -> list[lsp.TextEdit]:
    """The edits that make ``new`` of the text."""
    old_lines, new_lines = text.data.splitlines(keepends=True), new.splitlines(keepends=True)
    same = _common(old_lines, new_lines)
    same_end = _common(old_lines[same:][::-1], new_lines[same:][::-1])
    middle_old = old_lines[same : len(old_lines) - same_end]
    middle_new = new_lines[same : len(new_lines) - same_end]
    starts = [sum(map(len, old_lines[:same]))]
    for line in middle_old:
        starts.append(starts[-1] + len(line))
    matcher = difflib.SequenceMatcher(None, middle_old, middle_new, autojunk=False)
    return [
        lsp.TextEdit(text.range(starts[a], starts[b]), b"".join(middle_new[c:d]).decode("utf-8", ERRORS))
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    ]


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many lines they begin with alike."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def edits_of(
    ls: Server, document: Document, edits: Sequence[lsp.TextEdit], *, label: str = "", confirm: bool = False
) -> lsp.WorkspaceEdit:
    """Edits of one document, bound to its version and named, as far as the client can do that.

    Args:
        ls: the server.
        document: what is edited.
        edits: the edits.
        label: what they do, for clients that show it.
        confirm: whether the client shows them before they are made.
    """
    workspace = ls.client_capabilities.workspace
    support = workspace.workspace_edit if workspace is not None else None
    if support is None or not support.document_changes:
        return lsp.WorkspaceEdit(changes={document.uri: list(edits)})
    versioned = lsp.OptionalVersionedTextDocumentIdentifier(document.uri, document.version)
    if not label or support.change_annotation_support is None:
        return lsp.WorkspaceEdit(document_changes=[lsp.TextDocumentEdit(versioned, list(edits))])
    named = [lsp.AnnotatedTextEdit(annotation_id=ANNOTATION, range=e.range, new_text=e.new_text) for e in edits]
    return lsp.WorkspaceEdit(
        document_changes=[lsp.TextDocumentEdit(versioned, named)],
        change_annotations={ANNOTATION: lsp.ChangeAnnotation(label, needs_confirmation=confirm)},
    )


async def apply(ls: Server, document: Document, new: bytes, label: str, *, confirm: bool = False) -> bool:
    """Ask the client to make ``new`` of a document; whether it did."""
    edits = minimal_edits(document.text, new)
    if not edits:
        return True
    edit = edits_of(ls, document, edits, label=label, confirm=confirm)
    result = await ls.workspace_apply_edit_async(lsp.ApplyWorkspaceEditParams(edit, label))
    if not result.applied and not confirm:
        why = f": {result.failure_reason}" if result.failure_reason else ""
        text = f"The editor did not apply the change ({label}){why}. Nothing was changed; try again."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, text))
    return result.applied
