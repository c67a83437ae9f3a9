"""Keeps the last failure of each target until its function or the line that causes it is edited, or the next job starts.

Also stops a run whose function is edited: its results would not apply.
"""

from __future__ import annotations

import asyncio

from lsprotocol import types as lsp

from mtmc_lsp.docs import page
from mtmc_lsp.server.failures.failure import Failure, failure_of, line_of, named
from mtmc_lsp.server.handshake import SOURCE
from mtmc_lsp.server.jobs import Job
from mtmc_lsp.server.server import RUN_JOBS, Server
from mtmc_lsp.server.text import ERRORS, Document
from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.source.target_text import target_source

FAILED = "run-failed"
EDIT_SECONDS = 1.0
"""Time without edits after which a run of an edited function is stopped: an edit may be taken back."""


def register(server: Server) -> None:
    """Register the listeners for jobs and edits."""
    server.job_listeners.append(lambda job: note(server, job))
    server.change_listeners.append(lambda document: edited(server, document))


def note(ls: Server, job: Job) -> None:
    """Store the failure of a job, or forget the last one of its target."""
    ls.failures.pop((job.path, job.target), None)
    failure = failure_of(job)
    if failure is not None:
        ls.failures[job.path, job.target] = failure


def failure_diagnostics(ls: Server, document: Document) -> list[lsp.Diagnostic]:
    """The failures of a file, at the lines that cause them."""
    return [item for item, _ in _shown(ls, document)]


def _shown(ls: Server, document: Document) -> list[tuple[lsp.Diagnostic, Failure]]:
    shown = []
    for (path, _), failure in ls.failures.items():
        line = line_of(ls, failure) if path == document.path else None
        if line is None:
            continue
        item = lsp.Diagnostic(
            range=document.text.line_range(line),
            message=named(failure.target, failure.text),
            severity=lsp.DiagnosticSeverity.Error,
            code=FAILED,
            code_description=lsp.CodeDescription(page("diagnostics", FAILED).as_uri()),
            source=SOURCE,
            data={"target": failure.target},
        )
        shown.append((item, failure))
    return shown


def failure_fixes(ls: Server, document: Document, range_: lsp.Range) -> list[lsp.CodeAction]:
    """The command that helps with each failure in a range."""
    actions = []
    for item, failure in _shown(ls, document):
        if item.range.start.line > range_.end.line or item.range.end.line < range_.start.line:
            continue
        argument = {"uri": document.uri, "target": failure.target}
        command = lsp.Command(failure.button, f"mtmc.{failure.command}", arguments=[argument])
        # Only our extension can open its settings.
        if failure.command != "choosePython" or ls.options.offers_workload:
            actions.append(lsp.CodeAction(failure.button, lsp.CodeActionKind.QuickFix, [item], command=command))
    return actions


def edited(ls: Server, document: Document) -> None:
    """Look at the runs of a file once it is not edited for a moment."""
    if any(job.path == document.path and job.kind in RUN_JOBS for job in ls.jobs.active):
        asyncio.get_running_loop().call_later(EDIT_SECONDS, _look, ls, document.uri, document.version)


def _look(ls: Server, uri: str, version: int) -> None:
    document = ls.document(uri)
    if document is None or document.version != version:
        return
    for job in ls.jobs.active:
        if job.path == document.path and job.kind in RUN_JOBS and _is_edited(document, job):
            job.stop_reason = f"Stopped the run of {job.target}, because the function was edited. Optimize it again."
            ls.background(ls.jobs.cancel(job))


def _is_edited(document: Document, job: Job) -> bool:
    text = str(job.request["text"]).encode("utf-8", ERRORS)
    before = target_source(strip_generated(text, job.target), job.target)
    return before is not None and before != target_source(strip_generated(document.text.data, job.target), job.target)
