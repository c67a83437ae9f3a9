"""``workspace/executeCommand``: commands that start or cancel runs, plans and measurements.

Every command takes one object: ``{"uri": ..., "target": qualified name}``, some also a ``step``, ``job`` or ``command``. A
command returns immediately; the job that it starts reports progress.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams

from mtmc_lsp.core.action import capitalized
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.server.failures.failure import failure_text
from mtmc_lsp.server.failures.syntax import error_near, target_error
from mtmc_lsp.server.features.code_actions import directive_edit, proposed_directive
from mtmc_lsp.server.jobs import Job
from mtmc_lsp.server.kernels_file.texts import is_unsaved, whole_text
from mtmc_lsp.server.model_consent import MODEL_JOBS
from mtmc_lsp.server.server import CERTIFY, REPAIR, RUN_JOBS, Server
from mtmc_lsp.server.text import ERRORS, Document
from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.source.outline import OutlineEntry
from mtmc_lsp.source.syntax import line_start
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive

PROPOSED = "mtmc/proposedWorkload"
DIRECTIVE = "# mtmc: "
TUNING = "autotune"
"""The kind of edit that tunes a kernel."""
TITLES = {
    "optimize": "Optimizing {}",
    "plan": "Planning {}",
    "measure": "Measuring {}",
    "verify": "Verifying {}",
}


def register(server: Server) -> None:
    """Register the commands that start and cancel jobs."""
    server.command("mtmc.optimize")(optimize)
    server.command("mtmc.tune")(tune)
    server.command("mtmc.plan")(plan)
    server.command("mtmc.measure")(measure)
    server.command("mtmc.verify")(verify)
    server.command("mtmc.addWorkload")(add_workload)
    server.command("mtmc.cancel")(cancel)
    server.command("mtmc.jobs")(jobs)
    server.feature(PROPOSED)(proposed_workload)
    server.feature("mtmc/checkWorkload")(check_workload)
    server.feature("mtmc/targetAt")(target_at)
    server.feature(lsp.WINDOW_WORK_DONE_PROGRESS_CANCEL)(progress_cancelled)


def resolve_target(ls: Server, arguments: tuple[Any, ...]) -> tuple[Document, OutlineEntry, dict[str, Any]]:
    """The document, the target and the argument object of a command.

    Raises:
        JsonRpcInvalidParams: the argument is missing, or names no open file or no target.
    """
    argument = arguments[0] if arguments and isinstance(arguments[0], dict) else {}
    document = ls.document(str(argument.get("uri", "")))
    if document is None:
        raise JsonRpcInvalidParams('pass {"uri": ..., "target": ...} of an open Python file')
    outlined = document.outline.find(str(argument.get("target", "")))
    if outlined is None:
        names = ", ".join(document.outline.by_name) or "none"
        raise JsonRpcInvalidParams(f"no target {argument.get('target')!r} in {document.uri}; targets: {names}")
    return document, outlined, argument


async def optimize(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Start an optimisation run."""
    return await _start(ls, arguments, "optimize")


async def tune(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Start a run that only tunes the kernels of a target: block sizes, warps and stages for the GPU of this machine."""
    document, outlined, argument = resolve_target(ls, arguments)
    token = argument.get("workDoneToken")
    return await start(ls, document, outlined.target.qualname, "optimize", "Tuning {}", token=token, only=[TUNING])


async def plan(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Show the planned actions."""
    return await _start(ls, arguments, "plan")


async def measure(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Measure the target as it is in the editor."""
    return await _start(ls, arguments, "measure")


async def verify(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Verify the target, with its kernels as they are in the editor, against the original code."""
    return await _start(ls, arguments, "verify")


async def _start(ls: Server, arguments: tuple[Any, ...], kind: str) -> dict[str, Any] | None:
    document, outlined, argument = resolve_target(ls, arguments)
    return await start(ls, document, outlined.target.qualname, kind, TITLES[kind], token=argument.get("workDoneToken"))


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
    """Queue a job once the folder is trusted. Returns the job id, or None if the file is not saved or not trusted."""
    if not document.path or not os.path.isfile(document.path):
        text = f"{document.uri} does not exist on disk. Save it first."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, text))
        return None
    if not await ls.ensure_trust(document.path):
        return None
    root, run_settings = ls.root_of(document.path), (await ls.settings_of(document.uri)).run_settings()
    consented = kind in MODEL_JOBS and await ls.model_consent.ensure(ls, root, Path(document.path), run_settings)
    if kind in RUN_JOBS:
        await _end_verification(ls, document.path, target)
    # Check after all awaits: another command may have started a job in the meantime.
    active_job = ls.jobs.for_target(document.path, target)
    if active_job is not None:
        text = f"A job for {target} is already active: {active_job.title}."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
        return {"job": active_job.id}
    # A search starts from the original code; measure and verify use the file with its generated code.
    if is_unsaved(ls, document):
        text = f"The kernels of {Path(document.path).name} are not saved, and a job reads them from the disk. Save them first."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, text))
        return None
    is_whole = kind in ("measure", "verify")
    source = whole_text(ls, document, target) if is_whole else strip_generated(document.text.data, target)
    if kind == REPAIR:
        # Its edits are shown in the document as it is.
        source = document.text.data
    request = {
        "kind": kind,
        "path": document.path,
        "target": target,
        "text": source.decode("utf-8", ERRORS),
        "settings": run_settings,
        "consented": consented,
        **request,
    }
    job = ls.jobs.submit(Job(kind, document.uri, document.path, target, title.format(target), request, process))
    await ls.reporter.begin(job, token)
    ls.refresh(document.uri)
    return {"job": job.id}


async def _end_verification(ls: Server, path: str, target: str) -> None:
    """End the verification of steps that a new run replaces."""
    active = ls.jobs.for_target(path, target)
    if active is not None and active.kind == CERTIFY:
        active.stop_reason = f"Stopped verifying the steps of {target}, because a new run starts."
        await ls.jobs.cancel(active)
        await active.over.wait()


async def add_workload(ls: Server, *arguments: Any) -> None:
    """Insert a workload directive above the target, with the given ``inputs`` (``x=f32[8,48]``) or suggested ones."""
    document, outlined, argument = resolve_target(ls, arguments)
    inputs = " ".join(str(argument.get("inputs") or "").split())
    if inputs and (error := workload_error(document, outlined, inputs)):
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, f"{error} Nothing was written."))
        return
    edit = directive_edit(ls, document.uri, outlined.target.qualname, f"{DIRECTIVE}{inputs}" if inputs else "")
    if edit is not None:
        await ls.workspace_apply_edit_async(lsp.ApplyWorkspaceEditParams(edit, "Add a workload directive"))


def proposed_workload(ls: Server, params: Any) -> dict[str, str] | None:
    """``mtmc/proposedWorkload``: suggested inputs for a target (``uri``, ``target``), for the user to edit."""
    document = ls.document(str(getattr(params, "uri", "")))
    outlined = document.outline.find(str(getattr(params, "target", ""))) if document is not None else None
    if document is None or outlined is None:
        return None
    return {"inputs": proposed_directive(document, outlined).removeprefix(DIRECTIVE)}


def check_workload(ls: Server, params: Any) -> dict[str, str] | None:
    """``mtmc/checkWorkload``: why ``inputs`` do not describe the inputs of a target (``uri``, ``target``); empty if they do."""
    document = ls.document(str(getattr(params, "uri", "")))
    outlined = document.outline.find(str(getattr(params, "target", ""))) if document is not None else None
    if document is None or outlined is None:
        return None
    return {"error": workload_error(document, outlined, " ".join(str(getattr(params, "inputs", "")).split()))}


def workload_error(document: Document, outlined: OutlineEntry, inputs: str) -> str:
    """Why inputs cannot be the directive of a target, as a sentence; empty if they can."""
    text, line = document.text.data, outlined.first_line - 1
    start = line_start(text, document.text.offset(lsp.Position(line, 0)))
    indent = text[start : start + len(text[start:]) - len(text[start:].lstrip(b" \t"))]
    changed = text[:start] + indent + f"{DIRECTIVE}{inputs}\n".encode("utf-8", ERRORS) + text[start:]
    try:
        target = find_target(changed, document.path, outlined.target.qualname)
        workload = parse_directive(changed, target, document.path)
    except MtmcError as error:
        reason = failure_text(error.to_json(), document.path)
        return capitalized(reason)
    return "" if workload is not None else "Describe at least one tensor, for example x=f32[64,128]."


def target_at(ls: Server, params: Any) -> dict[str, str] | None:
    """``mtmc/targetAt``: the target at a ``line`` of ``uri``, or the reason why there is none."""
    document, line = ls.document(str(getattr(params, "uri", ""))), int(getattr(params, "line", 0))
    if document is None:
        return None
    entry = document.outline.target_at(line)
    error = target_error(document, entry) if entry is not None else error_near(document, line)
    if error:
        return {"target": "", "reason": error}
    if entry is not None:
        return {"target": entry.target.qualname, "reason": ""}
    names = ", ".join(item.target.qualname for item in document.outline.targets[:5])
    found = f" This file has {names}." if names else " This file has none."
    return {"target": "", "reason": f"Put the cursor in a PyTorch function or module.{found}"}


async def cancel(ls: Server, *arguments: Any) -> bool:
    """Cancel a job by its id or by ``uri`` and ``target``; without arguments, cancel all jobs."""
    argument = arguments[0] if arguments and isinstance(arguments[0], dict) else {}
    matches = [
        job
        for job in ls.jobs.active
        if argument.get("job") in (None, job.id)
        and argument.get("uri") in (None, job.uri)
        and argument.get("target") in (None, job.target)
    ]
    for job in matches:
        await ls.jobs.cancel(job)
    return bool(matches)


def jobs(ls: Server, *arguments: Any) -> list[dict[str, Any]]:
    """The running and queued jobs."""
    return [
        {"job": j.id, "kind": j.kind, "uri": j.uri, "target": j.target, "state": j.state.value, "stage": j.stage}
        for j in ls.jobs.active
    ]


async def progress_cancelled(ls: Server, params: lsp.WorkDoneProgressCancelParams) -> None:
    """Cancel the job of a progress that the user cancelled."""
    number = ls.reporter.job_of(params.token)
    job = ls.jobs.find(number) if number is not None else None
    if job is not None:
        await ls.jobs.cancel(job)
