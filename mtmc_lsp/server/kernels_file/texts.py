"""The files of kernels beside the files that the editor shows: as the editor holds them, else as they are on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.source.sibling.disk import read_kernels
from mtmc_lsp.source.sibling.pair import FilePair, block_of, joined, kernels_path
from mtmc_lsp.source.sibling.statement import find_kernel_import

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document


def kernels_document(ls: Server, document: Document) -> Document | None:
    """The open document with the kernels of a file."""
    path = str(kernels_path(Path(document.path)))
    return next((item for item in ls.documents.values() if item.path == path), None)


def present_kernels(ls: Server, document: Document) -> bytes | None:
    """The file of kernels beside a file, whether or not it imports any; None if there is none.

    Raises:
        RequestError: it is a link or cannot be read.
    """
    opened = kernels_document(ls, document)
    return opened.text.data if opened is not None else read_kernels(Path(document.path))


def imported_kernels(ls: Server, document: Document) -> bytes | None:
    """The file of kernels that a file imports; None if it imports none or the file cannot be read."""
    if not document.path or find_kernel_import(document.text.data) is None:
        return None
    try:
        return present_kernels(ls, document)
    except MtmcError:
        return None


def whole_text(ls: Server, document: Document, qualname: str) -> bytes:
    """The file with the generated code of a target in it, also if that is in the file of kernels."""
    outlined = document.outline.find(qualname)
    if outlined is None:
        return document.text.data
    try:
        return joined(FilePair(document.text.data, imported_kernels(ls, document)), outlined.target)
    except MtmcError:
        return document.text.data


def is_unsaved(ls: Server, document: Document) -> bool:
    """Whether the file imports kernels that the editor has not saved, so that a job would import others or none."""
    if find_kernel_import(document.text.data) is None:
        return False
    opened = kernels_document(ls, document)
    try:
        return opened is not None and read_kernels(Path(document.path)) != opened.text.data
    except MtmcError:
        return False


def block_place(ls: Server, document: Document, qualname: str) -> tuple[str, int] | None:
    """The path of the file of kernels, and the 0-based line where the block of a target starts in it."""
    kernels = imported_kernels(ls, document)
    found = block_of(kernels, qualname) if kernels is not None else None
    if kernels is None or found is None:
        return None
    return str(kernels_path(Path(document.path))), kernels.count(b"\n", 0, found[1].start)
