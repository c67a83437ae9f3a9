"""Diagnostics: what a run found, whether it still holds, and the static checks; pulled by clients that do, else pushed."""

from __future__ import annotations

import asyncio
import hashlib

from lsprotocol import types as lsp

from mtmc_lsp.core.results import Verdict
from mtmc_lsp.core.run import RunStatus, Step
from mtmc_lsp.core.workload import Target
from mtmc_lsp.docs import page
from mtmc_lsp.report.phrases import ratio_text
from mtmc_lsp.server.handshake import SOURCE
from mtmc_lsp.server.reviews import Standing
from mtmc_lsp.server.server import Document, Server
from mtmc_lsp.source.lint.finding import Finding, Severity
from mtmc_lsp.source.target_text import block_start

SEVERITIES = {
    Severity.ERROR: lsp.DiagnosticSeverity.Error,
    Severity.WARNING: lsp.DiagnosticSeverity.Warning,
    Severity.HINT: lsp.DiagnosticSeverity.Hint,
}
PUSH_SECONDS = 0.01
"""Least time between two pushes: the first of a burst of keystrokes is looked at immediately, the others together."""
SETTLE_SECONDS = 0.5
"""How long nothing is typed before all of a broken file is read."""


def register(server: Server) -> None:
    """Register both ways of diagnostics."""
    options = lsp.DiagnosticOptions(inter_file_dependencies=False, workspace_diagnostics=False, identifier=SOURCE)
    server.feature(lsp.TEXT_DOCUMENT_DIAGNOSTIC, options)(pull)
    server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)(did_change)
    server.refresh_listeners.append(lambda uris: refresh(server, uris))


def pull(ls: Server, params: lsp.DocumentDiagnosticParams) -> lsp.DocumentDiagnosticReport:
    """Answer a client that asks."""
    document = ls.document(params.text_document.uri)
    items = diagnostics_of(ls, document) if document is not None else []
    result = hashlib.sha256(repr(items).encode("utf-8", "replace")).hexdigest()[:16]
    if params.previous_result_id == result:
        return lsp.RelatedUnchangedDocumentDiagnosticReport(result_id=result)
    return lsp.RelatedFullDocumentDiagnosticReport(items=items, result_id=result)


def did_change(ls: Server, params: lsp.DidChangeTextDocumentParams) -> None:
    """Look at what was typed."""
    uri = params.text_document.uri
    if not _pulls(ls):
        _push_soon(ls, uri)
    document = ls.document(uri)
    if document is not None:
        ls.refresh_dependents(document.path)
        if document.settle_timer is not None:
            document.settle_timer.cancel()
        document.settle_timer = asyncio.get_running_loop().call_later(SETTLE_SECONDS, _settle, ls, document)


def _settle(ls: Server, document: Document) -> None:
    if ls.document(document.uri) is document and document.settle():
        ls.refresh(document.uri)


def refresh(ls: Server, uris: set[str]) -> None:
    """There is news that the client does not know of."""
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
        # A run has news many times in a second, and few of them change what is said of the file.
        if document.pushed == (document.version, items):
            return
        document.pushed = (document.version, items)
    version = document.version if document is not None else None
    ls.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, items, version))


def diagnostics_of(ls: Server, document: Document) -> list[lsp.Diagnostic]:
    """Everything that is to be said of a file."""
    found = [item for standing in ls.standings(document) for item in _of_standing(document, standing)]
    for (path, qualname), (text, verdict) in ls.verdicts.items():
        if path == document.path and not verdict.is_correct and text == document.text.data:
            place = document.outline.find(qualname)
            found += [_incorrect(document, place.target, verdict)] if place is not None else []
    ignored = ls.settings.ignored_checks
    found += [of_finding(document, start, item) for start, item in document.findings if item.code not in ignored]
    return found


def of_finding(document: Document, start: int, finding: Finding) -> lsp.Diagnostic:
    """A finding of the static checks."""
    return lsp.Diagnostic(
        range=document.text.range(start + finding.start, start + finding.end),
        message=finding.message,
        severity=SEVERITIES[finding.severity],
        code=finding.code,
        code_description=described(finding.code, "checks"),
        source=SOURCE,
    )


def described(code: str, kind: str = "diagnostics") -> lsp.CodeDescription:
    """The link to a code's page."""
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
        code_description=described(code),
        source=SOURCE,
        related_information=related or None,
        data={"target": target.qualname},
    )


def _of_standing(document: Document, standing: Standing) -> list[lsp.Diagnostic]:
    review = standing.review
    name = review.qualname
    kernel = _kernel_place(document, name)
    if standing.is_stale:
        what = "; the kernel in the file still computes what it was" if kernel and standing.is_changed else ""
        if kernel and not standing.is_changed:
            what = f"; the kernels of {name} hold for what it was"
        text = f"{standing.why_stale}{what}. Optimise {'it' if standing.is_changed else name} again."
        is_silent = standing.is_changed or not kernel
        severity = lsp.DiagnosticSeverity.Hint if is_silent else lsp.DiagnosticSeverity.Warning
        return [_diagnostic(document, standing.place.target, "stale", severity, text, kernel)]
    if review.status is RunStatus.NO_GAIN and review.steps:
        text = f"Nothing was faster than {name} as it is: {len(review.steps)} steps were tried."
        return [_diagnostic(document, standing.place.target, "not-faster", lsp.DiagnosticSeverity.Hint, text, [])]
    if review.status is RunStatus.INCORRECT:
        text = f"No step for {name} could be verified: {review.steps[-1].reason}"
        return [
            _diagnostic(document, standing.place.target, "unverified", lsp.DiagnosticSeverity.Information, text, [])
        ]
    step = standing.shown
    if step is None:
        return []
    related = [*kernel, *_step_places(document, standing)]
    gpu = review.environment.gpu if review.environment is not None else ""
    text = speed_words(step, gpu)
    if standing.pending:
        text = f"{text}; {len(standing.pending)} steps wait for your decision"
    code = "speedup" if step.timing is not None else "unmeasured"
    return [
        _diagnostic(
            document, standing.place.target, code, lsp.DiagnosticSeverity.Information, f"{name}: {text}.", related
        )
    ]


def speed_words(step: Step, gpu: str) -> str:
    """``1.83x (1.79 to 1.86) over compile: 12.3 us against 22.5 us, on NVIDIA H200``."""
    timing = step.timing
    if timing is None:
        return "verified, not timed (no GPU was used)"
    best = next((b for b in timing.baselines if b.name == timing.best), None)
    if best is None or best.speedup is None:
        return f"{timing.median_us:.1f} us on {gpu}, with no baseline to compare"
    times = f"{timing.median_us:.1f} us against {best.median_us:.1f} us"
    return f"{ratio_text(best.speedup)} over {best.name}: {times}, on {gpu}"


def _incorrect(document: Document, target: Target, verdict: Verdict) -> lsp.Diagnostic:
    text = f"{target.qualname} with its kernel does not compute what its own code does: {verdict.reason}"
    severity = lsp.DiagnosticSeverity.Error
    return _diagnostic(document, target, "incorrect", severity, text, _kernel_place(document, target.qualname))


def _kernel_place(document: Document, qualname: str) -> list[lsp.DiagnosticRelatedInformation]:
    """Where the generated block of a target begins."""
    start = block_start(document.text.data, qualname)
    if start < 0:
        return []
    line = document.text.position(start).line
    place = lsp.Location(document.uri, document.text.line_range(line))
    return [lsp.DiagnosticRelatedInformation(place, f"the kernels of {qualname}")]


def _step_places(document: Document, standing: Standing) -> list[lsp.DiagnosticRelatedInformation]:
    """The lines that each step is about, where they stand now."""
    result = standing.review.result
    found = standing.place.target
    if result is None:
        return []
    # The dispatch statement is first in the body, so lines of the body have moved as far as the end has.
    moved = found.end_line - result.target.end_line
    places = []
    for step in standing.review.accepted:
        first, last = step.action.lines
        if not first or last + moved > document.text.line_count:
            continue
        start, end = document.text.line_range(first + moved - 1), document.text.line_range(last + moved - 1)
        place = lsp.Location(document.uri, lsp.Range(start.start, end.end))
        places.append(lsp.DiagnosticRelatedInformation(place, f"step {step.index}: {step.action.text}"))
    return places
