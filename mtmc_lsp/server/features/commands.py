"""``workspace/executeCommand``: start a run, a plan or a measurement, end one, and the like.

Every command takes one object: ``{"uri": ..., "target": qualified name}``, and some a ``step``, ``job`` or ``command``. A
command answers at once; what it starts tells of itself by progress.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams

from mtmc_lsp.server.features.code_actions import directive_edit, proposed_directive
from mtmc_lsp.server.jobs import Job
from mtmc_lsp.server.model_consent import ASKING
from mtmc_lsp.server.server import Document, Server
from mtmc_lsp.server.text import ERRORS
from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.source.outline import OutlineEntry

PROPOSED = "mtmc/proposedWorkload"
DIRECTIVE = "# mtmc: "
TITLES = {
    "optimize": "Optimizing {}",
    "plan": "Planning {}",
    "measure": "Measuring {}",
    "verify": "Verifying {}",
}


def register(server: Server) -> None:
    """Register the commands that start and end work."""
    server.command("mtmc.optimize")(optimize)
    server.command("mtmc.plan")(plan)
    server.command("mtmc.measure")(measure)
    server.command("mtmc.verify")(verify)
    server.command("mtmc.addWorkload")(add_workload)
    server.command("mtmc.cancel")(cancel)
    server.command("mtmc.jobs")(jobs)
    server.feature(PROPOSED)(proposed_workload)
    server.feature(lsp.WINDOW_WORK_DONE_PROGRESS_CANCEL)(progress_cancelled)


def place(ls: Server, arguments: tuple[Any, ...]) -> tuple[Document, OutlineEntry, dict[str, Any]]:
    """The document and the target that a command is about, and its whole argument.

    Raises:
        JsonRpcInvalidParams: there is no such argument, open file or target.
    """
    given = arguments[0] if arguments and isinstance(arguments[0], dict) else {}
    document = ls.document(str(given.get("uri", "")))
    if document is None:
        raise JsonRpcInvalidParams('pass {"uri": ..., "target": ...} of a Python file that is open')
    found = document.outline.find(str(given.get("target", "")))
    if found is None:
        names = ", ".join(document.outline.by_name) or "none"
        raise JsonRpcInvalidParams(f"no target {given.get('target')!r} in {document.uri}; there is {names}")
    return document, found, given


async def optimize(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Start a run."""
    return await _start(ls, arguments, "optimize")


async def plan(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Show what could be tried first."""
    return await _start(ls, arguments, "plan")


async def measure(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Time the target as it is in the editor."""
    return await _start(ls, arguments, "measure")


async def verify(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Compare the target, with its kernels as they are in the editor, with its own code."""
    return await _start(ls, arguments, "verify")


async def _start(ls: Server, arguments: tuple[Any, ...], kind: str) -> dict[str, Any] | None:
    document, found, given = place(ls, arguments)
    return await start(ls, document, found.target.qualname, kind, TITLES[kind], token=given.get("workDoneToken"))


async def start(
    ls: Server,
    document: Document,
    target: str,
    kind: str,
    title: str,
    *,
    token: lsp.ProgressToken | None = None,
    process: tuple[str, ...] = (),
    **request: Any,
) -> dict[str, Any] | None:
    """Put a job into the queue, once the folder is trusted; gives its number, None where the user said no."""
    if not document.path or not Path(document.path).is_file():
        text = f"{document.uri} is not on disk yet; save it first."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, text))
        return None
    if not await ls.ensure_trust(document.path):
        return None
    root, of_run = ls.root_of(document.path), (await ls.settings_of(document.uri)).of_run()
    consented = kind in ASKING and await ls.model_consent.ensure(ls, root, Path(document.path), of_run)
    # After all that is waited for: another command may have come meanwhile.
    busy = ls.jobs.of(document.path, target)
    if busy is not None:
        text = f"{target} is being worked on already: {busy.title}."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
        return {"job": busy.id}
    # A search starts from the user's own text; what the file holds of an earlier one is measured and verified as it is.
    text_now = document.text.data if kind in ("measure", "verify") else strip_generated(document.text.data, target)
    request = {
        "kind": kind,
        "path": document.path,
        "target": target,
        "text": text_now.decode("utf-8", ERRORS),
        "settings": of_run,
        "consented": consented,
        **request,
    }
    job = ls.jobs.submit(Job(kind, document.uri, document.path, target, title.format(target), request, process))
    await ls.reporter.begin(job, token)
    ls.refresh(document.uri)
    return {"job": job.id}


async def add_workload(ls: Server, *arguments: Any) -> None:
    """Put the directive above the target: the ``inputs`` that are given (``x=f32[8,48]``), else those that are proposed."""
    document, found, given = place(ls, arguments)
    inputs = " ".join(str(given.get("inputs") or "").split())
    edit = directive_edit(ls, document.uri, found.target.qualname, f"{DIRECTIVE}{inputs}" if inputs else "")
    if edit is not None:
        await ls.workspace_apply_edit_async(lsp.ApplyWorkspaceEditParams(edit, "Add a workload directive"))


def proposed_workload(ls: Server, params: Any) -> dict[str, str] | None:
    """``mtmc/proposedWorkload``: inputs that a target (``uri``, ``target``) could have, to be changed before they are written."""
    document = ls.document(str(getattr(params, "uri", "")))
    found = document.outline.find(str(getattr(params, "target", ""))) if document is not None else None
    if document is None or found is None:
        return None
    return {"inputs": proposed_directive(document, found).removeprefix(DIRECTIVE)}


async def cancel(ls: Server, *arguments: Any) -> bool:
    """End a job by its number, or by ``uri`` and ``target``; without either, all of them."""
    given = arguments[0] if arguments and isinstance(arguments[0], dict) else {}
    chosen = [
        job
        for job in ls.jobs.present
        if given.get("job") in (None, job.id)
        and given.get("uri") in (None, job.uri)
        and given.get("target") in (None, job.target)
    ]
    for job in chosen:
        await ls.jobs.cancel(job)
    return bool(chosen)


def jobs(ls: Server, *arguments: Any) -> list[dict[str, Any]]:
    """What runs, and what waits."""
    return [
        {"job": j.id, "kind": j.kind, "uri": j.uri, "target": j.target, "state": j.state.value, "stage": j.stage}
        for j in ls.jobs.present
    ]


async def progress_cancelled(ls: Server, params: lsp.WorkDoneProgressCancelParams) -> None:
    """The user pressed cancel."""
    number = ls.reporter.job_of(params.token)
    job = ls.jobs.find(number) if number is not None else None
    if job is not None:
        await ls.jobs.cancel(job)
