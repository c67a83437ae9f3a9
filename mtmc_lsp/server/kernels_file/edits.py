"""Edits of a file and the file of its kernels. The kernels arrive before the import of them, and leave after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lsprotocol import types as lsp
from pygls.uris import from_fs_path

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.server.edits import ANNOTATION, applied, apply_text, minimal_edits, workspace_edit
from mtmc_lsp.server.kernels_file.texts import kernels_document
from mtmc_lsp.server.text import ERRORS, Text
from mtmc_lsp.source.sibling.disk import write_kernels
from mtmc_lsp.source.sibling.pair import FilePair, kernels_path

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document

Change = lsp.TextDocumentEdit | lsp.CreateFile | lsp.RenameFile | lsp.DeleteFile


def pair_edit(
    ls: Server, document: Document, kernels: bytes | None, new: FilePair, *, label: str = "", confirm: bool = False
) -> lsp.WorkspaceEdit:
    """The edit that gives both files new texts. A client that cannot create or delete files gets the edit of texts alone.

    Args:
        kernels: the present text of the file of kernels.
    """
    edit = workspace_edit(ls, document, minimal_edits(document.text, new.user), label=label, confirm=confirm)
    uri = from_fs_path(str(kernels_path(Path(document.path)))) or ""
    if kernels == new.kernels:
        return edit
    opened = kernels_document(ls, document)
    text = opened.text if opened is not None else Text((kernels or b"").decode("utf-8", ERRORS), document.text.encoding)
    edits = minimal_edits(text, new.kernels or b"")
    if edit.document_changes is None:
        if kernels is not None and new.kernels is not None:
            edit.changes = {**(edit.changes or {}), uri: edits}
        return edit
    annotation = ANNOTATION if edit.change_annotations is not None else None
    annotated: list[lsp.TextEdit | lsp.AnnotatedTextEdit | lsp.SnippetTextEdit] = [
        lsp.AnnotatedTextEdit(annotation_id=annotation, range=e.range, new_text=e.new_text) if annotation else e
        for e in edits
    ]
    version = opened.version if opened is not None else None
    identifier = lsp.OptionalVersionedTextDocumentIdentifier(uri, version)
    written: list[Change] = [lsp.TextDocumentEdit(identifier, annotated)]
    if kernels is None:
        written = [lsp.CreateFile(uri, annotation_id=annotation), *written] if _supports(ls, "create") else []
    elif new.kernels is None:
        written = [lsp.DeleteFile(uri, annotation_id=annotation)] if _supports(ls, "delete") else []
    changes = [item for item in edit.document_changes if not isinstance(item, lsp.TextDocumentEdit) or item.edits]
    edit.document_changes = [*changes, *written] if _is_removal(kernels, new) else [*written, *changes]
    return edit


def _is_removal(kernels: bytes | None, new: FilePair) -> bool:
    """Whether kernels leave the file."""
    return new.kernels is None or (kernels is not None and len(new.kernels) < len(kernels))


def _supports(ls: Server, operation: str) -> bool:
    """Whether the client creates or deletes files as part of an edit."""
    workspace = ls.client_capabilities.workspace
    support = workspace.workspace_edit if workspace is not None else None
    operations = support.resource_operations if support is not None and support.document_changes else None
    return operations is not None and operation in [getattr(item, "value", item) for item in operations]


async def apply_pair(
    ls: Server, document: Document, kernels: bytes | None, new: FilePair, label: str, *, confirm: bool = False
) -> bool:
    """Ask the client to give both files new texts. Returns whether it did.

    A file that the client can neither create nor delete is written here, in trusted folders only.
    """
    if kernels == new.kernels:
        return await apply_text(ls, document, new.user, label, confirm=confirm)
    is_whole = kernels is not None and new.kernels is not None
    by_client = is_whole or _supports(ls, "delete" if new.kernels is None else "create")
    if by_client:
        edit = pair_edit(ls, document, kernels, new, label=label, confirm=confirm)
        return await applied(ls, edit, label, confirm=confirm)
    if not await ls.ensure_trust(document.path):
        return False
    if new.kernels is not None and not _written(ls, document, kernels, new.kernels):
        return False
    if not await apply_text(ls, document, new.user, label, confirm=confirm):
        if new.kernels is not None:
            _written(ls, document, new.kernels, kernels)
        return False
    return new.kernels is not None or _written(ls, document, kernels, None)


def _written(ls: Server, document: Document, before: bytes | None, after: bytes | None) -> bool:
    try:
        write_kernels(Path(document.path), before, after, ls.root_of(document.path) / FOLDER / "backups")
    except MtmcError as error:
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, str(error)))
        return False
    return True
