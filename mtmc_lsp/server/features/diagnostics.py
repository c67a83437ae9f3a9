"""Diagnostics: results of runs, stale runs, and static checks. Pulled by clients that support it, otherwise pushed."""

from __future__ import annotations

import asyncio
import hashlib

from lsprotocol import types as lsp
from pygls.uris import from_fs_path

from mtmc_lsp.core.results import Verdict
from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.core.workload import Target
from mtmc_lsp.docs import page
from mtmc_lsp.report.phrases import are_unfinished
from mtmc_lsp.server.failures.feature import failure_diagnostics
from mtmc_lsp.server.failures.syntax import syntax_diagnostics
from mtmc_lsp.server.handshake import SOURCE
from mtmc_lsp.server.kernels_file.texts import block_place, whole_text
from mtmc_lsp.server.reviews import ReviewState
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.blocks import find_block
from mtmc_lsp.source.lint.finding import Finding, Severity

SEVERITIES = {
    Severity.ERROR: lsp.DiagnosticSeverity.Error,
    Severity.WARNING: lsp.DiagnosticSeverity.Warning,
    Severity.HINT: lsp.DiagnosticSeverity.Hint,
}
NOT_ANALYSED = "not-analysed"
PUSH_SECONDS = 0.01
"""Minimum time between two pushes: the first edit of a burst is checked immediately, the others together."""
SETTLE_SECONDS = 0.5
"""Time without edits before syntax errors are marked, and a file with errors is outlined completely."""


def register(server: Server) -> None:
    """Register pull and push diagnostics."""
    options = lsp.DiagnosticOptions(inter_file_dependencies=False, workspace_diagnostics=False, identifier=SOURCE)
    server.feature(lsp.TEXT_DOCUMENT_DIAGNOSTIC, options)(pull)
    server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)(did_change)
    server.refresh_listeners.append(lambda uris: refresh(server, uris))


def pull(ls: Server, params: lsp.DocumentDiagnosticParams) -> lsp.DocumentDiagnosticReport:
    """Answer a diagnostics request."""
    document = ls.document(params.text_document.uri)
    items = diagnostics_of(ls, document) if document is not None else []
    result = hashlib.sha256(repr(items).encode("utf-8", "replace")).hexdigest()[:16]
    if params.previous_result_id == result:
        return lsp.RelatedUnchangedDocumentDiagnosticReport(result_id=result)
    return lsp.RelatedFullDocumentDiagnosticReport(items=items, result_id=result)


def did_change(ls: Server, params: lsp.DidChangeTextDocumentParams) -> None:
    """Schedule diagnostics after an edit."""
    uri = params.text_document.uri
    if not _pulls(ls):
        _push_soon(ls, uri)
    document = ls.document(uri)
    if document is not None:
        for listener in ls.change_listeners:
            listener(document)
        ls.refresh_dependents(document.path)
        settle_later(ls, document)


def settle_later(ls: Server, document: Document) -> None:
    """Look for syntax errors, and outline a file that has some completely, once it is not edited for a moment."""
    if document.settle_timer is not None:
        document.settle_timer.cancel()
    document.settle_timer = asyncio.get_running_loop().call_later(SETTLE_SECONDS, _settle, ls, document)


def _settle(ls: Server, document: Document) -> None:
    if ls.document(document.uri) is not document:
        return
    has_changed = document.settle()
    if document.check_syntax() or has_changed:
        ls.refresh(document.uri)


def refresh(ls: Server, uris: set[str]) -> None:
    """Push diagnostics, or ask the client to pull them again."""
    if not _pulls(ls):
        for uri in uris:
            _push_soon(ls, uri)
        return
    workspace = ls.client_capabilities.workspace
    if workspace is not None and workspace.diagnostics is not None and workspace.diagnostics.refresh_support:
        ls.workspace_diagnostic_refresh(None)


def _pulls(ls: Server) -> bool:
    text = ls.client_capabilities.text_document
    return text is not None and text.diagnostic is not None


def _push_soon(ls: Server, uri: str) -> None:
    if uri not in ls.pushing:
        ls.pushing.add(uri)
        loop = asyncio.get_running_loop()
        document = ls.document(uri)
        loop.call_at(document.pushed_at + PUSH_SECONDS if document is not None else 0.0, _push, ls, uri)


def _push(ls: Server, uri: str) -> None:
    ls.pushing.discard(uri)
    document = ls.document(uri)
    items = diagnostics_of(ls, document) if document is not None else []
    if document is not None:
        document.pushed_at = asyncio.get_running_loop().time()
        # A run reports changes many times per second; few of them change the diagnostics.
        if document.pushed == (document.version, items):
            return
        document.pushed = (document.version, items)
    version = document.version if document is not None else None
    ls.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, items, version))


def diagnostics_of(ls: Server, document: Document) -> list[lsp.Diagnostic]:
    """All diagnostics of a file."""
    diagnostics = [
        item for review_state in ls.review_states(document) for item in _review_diagnostics(ls, document, review_state)
    ]
    for (path, qualname), (text, verdict) in ls.verdicts.items():
        if path == document.path and not verdict.is_correct and text == whole_text(ls, document, qualname):
            outlined = document.outline.find(qualname)
            diagnostics += [_incorrect(ls, document, outlined.target, verdict)] if outlined is not None else []
    diagnostics += [*failure_diagnostics(ls, document), *syntax_diagnostics(ls, document)]
    ignored = ls.settings.ignored_checks
    diagnostics += [
        diagnostic_of(document, start, item) for start, item in document.findings if item.code not in ignored
    ]
    return diagnostics + [_not_analysed(document, start, end, reason) for start, end, reason in document.not_analysed]


def _not_analysed(document: Document, start: int, end: int, reason: str) -> lsp.Diagnostic:
    first, last = document.text.position(start), document.text.position(end)
    return lsp.Diagnostic(
        # Only the first line: editors would underline thousands of them.
        range=document.text.line_range(first.line) if first.line != last.line else lsp.Range(first, last),
        message=f"{reason[0].upper()}{reason[1:]}.",
        severity=lsp.DiagnosticSeverity.Information,
        code=NOT_ANALYSED,
        code_description=documentation_link(NOT_ANALYSED),
        source=SOURCE,
    )


def diagnostic_of(document: Document, start: int, finding: Finding) -> lsp.Diagnostic:
    """The diagnostic of a finding of the static checks."""
    return lsp.Diagnostic(
        range=document.text.range(start + finding.start, start + finding.end),
        message=finding.message,
        severity=SEVERITIES[finding.severity],
        code=finding.code,
        code_description=documentation_link(finding.code, "checks"),
        source=SOURCE,
    )


def documentation_link(code: str, kind: str = "diagnostics") -> lsp.CodeDescription:
    """The link to the documentation of a code."""
    return lsp.CodeDescription(page(kind, code).as_uri())


def _diagnostic(
    document: Document,
    target: Target,
    code: str,
    severity: lsp.DiagnosticSeverity,
    message: str,
    related: list[lsp.DiagnosticRelatedInformation],
) -> lsp.Diagnostic:
    return lsp.Diagnostic(
        range=document.text.line_range(target.start_line - 1),
        message=message,
        severity=severity,
        code=code,
        code_description=documentation_link(code),
        source=SOURCE,
        related_information=related or None,
        data={"target": target.qualname},
    )


def _review_diagnostics(ls: Server, document: Document, review_state: ReviewState) -> list[lsp.Diagnostic]:
    review = review_state.review
    name = review.qualname
    kernel = _kernel_location(ls, document, name)
    if review_state.is_stale:
        consequence = (
            "; the kernel in the file still computes the old version" if kernel and review_state.is_changed else ""
        )
        if kernel and not review_state.is_changed:
            consequence = f"; the kernels of {name} are only valid for the old state"
        text = f"{review_state.stale_description}{consequence}. Optimise {'it' if review_state.is_changed else name} again."
        is_silent = review_state.is_changed or not kernel
        severity = lsp.DiagnosticSeverity.Hint if is_silent else lsp.DiagnosticSeverity.Warning
        return [_diagnostic(document, review_state.outlined.target, "stale", severity, text, kernel)]
    if review.status is RunStatus.NO_GAIN and review.steps:
        text = (
            f"The budget ended before a version of {name} was verified; set a larger one, or a smaller workload."
            if are_unfinished(review.steps)
            else f"No version was faster than {name}: {len(review.steps)} steps were tried."
        )
        return [
            _diagnostic(document, review_state.outlined.target, "not-faster", lsp.DiagnosticSeverity.Hint, text, [])
        ]
    if review.status is RunStatus.INCORRECT:
        text = f"No step for {name} could be verified: {review.steps[-1].reason}"
        return [
            _diagnostic(document, review_state.outlined.target, "unverified", lsp.DiagnosticSeverity.Hint, text, [])
        ]
    return []


def _incorrect(ls: Server, document: Document, target: Target, verdict: Verdict) -> lsp.Diagnostic:
    text = f"{target.qualname} with its kernel does not match its original code: {verdict.reason}"
    severity = lsp.DiagnosticSeverity.Error
    return _diagnostic(document, target, "incorrect", severity, text, _kernel_location(ls, document, target.qualname))


def _kernel_location(ls: Server, document: Document, qualname: str) -> list[lsp.DiagnosticRelatedInformation]:
    """The start of the generated block of a target."""
    block = find_block(document.text.data, qualname)
    if block is not None:
        location = lsp.Location(document.uri, document.text.line_range(document.text.position(block.start).line))
    elif (place := block_place(ls, document, qualname)) is not None:
        path, line = place
        location = lsp.Location(from_fs_path(path) or "", lsp.Range(lsp.Position(line, 0), lsp.Position(line + 1, 0)))
    else:
        return []
    return [lsp.DiagnosticRelatedInformation(location, f"the kernels of {qualname}")]
