"""Syntax errors: a mark at their line, and why nothing can be optimised until they are fixed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lsprotocol import types as lsp

from mtmc_lsp.docs import page
from mtmc_lsp.server.handshake import SOURCE
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.outline import OutlineEntry
from mtmc_lsp.source.syntax import PythonError, python_error

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server

SYNTAX_ERROR = "syntax-error"


def syntax_diagnostics(ls: Server, document: Document) -> list[lsp.Diagnostic]:
    """The syntax errors of a file with targets, unless another server of the client marks them."""
    is_silent = ls.options.marks_syntax_errors or SYNTAX_ERROR in ls.settings.ignored_checks
    if is_silent or not document.syntax_errors or not document.uses_tensors or not document.outline.targets:
        return []
    return [
        lsp.Diagnostic(
            range=document.text.line_range(error.line - 1),
            message=f"Syntax error: {error.message}.",
            severity=lsp.DiagnosticSeverity.Error,
            code=SYNTAX_ERROR,
            code_description=lsp.CodeDescription(page("diagnostics", SYNTAX_ERROR).as_uri()),
            source=SOURCE,
        )
        for error in document.syntax_errors
    ]


def target_error(document: Document, entry: OutlineEntry) -> str:
    """Why a target cannot be optimised before a syntax error is fixed; empty if there is none.

    An error elsewhere in the file counts too: the file cannot be imported.
    """
    here = python_error(entry.chunk.text)
    if here is not None:
        return _sentence(here.moved(entry.chunk.line))
    if entry.is_broken:
        name = entry.target.qualname
        remedy = "Indent lines inside brackets as far as their statement, as formatters do."
        return f"{name} cannot be read here, although Python can read it. {remedy}"
    return next((_sentence(error) for error in document.syntax_errors), "")


def error_near(document: Document, line: int) -> str:
    """The syntax error nearest to a 0-based line, as a sentence; empty if the file has none."""
    document.check_syntax()
    errors = sorted(document.syntax_errors, key=lambda error: abs(error.line - 1 - line))
    return next((_sentence(error) for error in errors), "")


def _sentence(error: PythonError) -> str:
    return f"Line {error.line} has a syntax error: {error.message}. Fix it first."
