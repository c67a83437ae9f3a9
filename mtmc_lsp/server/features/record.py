"""*Record inputs from a command*: runs the user's program, records how it calls the target, and offers the calls as workload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp

from mtmc_lsp.process.isolation import isolated_command
from mtmc_lsp.server.features.code_actions import directive_edit
from mtmc_lsp.server.features.commands import TITLES, resolve_target, start
from mtmc_lsp.server.jobs import Job, JobState
from mtmc_lsp.server.progress import answer_calls, recording_text
from mtmc_lsp.server.server import Server
from mtmc_lsp.source.entry_points import programs_using

RECORDER = isolated_command("mtmc_lsp.server.recorder")
MAX_PROGRAMS = 4
"""Maximum number of programs to choose from: clients show them as buttons."""
ADD, OPTIMIZE, DONE = "Add as directive", "Optimize now", "Done"


def register(server: Server) -> None:
    """Register the command and the question after a recording."""
    server.command("mtmc.record")(record)
    server.job_end_listeners.append(lambda job: offer(server, job))


async def record(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Run the given command, else the command from the settings, else a program that the user chooses."""
    document, outlined, argument = resolve_target(ls, arguments)
    name, folder = outlined.target.qualname, ls.root_of(document.path)
    settings = await ls.settings_of(document.uri)
    command = (
        str(argument.get("command") or "") or settings.record_command or await _chosen_program(ls, document.path, name)
    )
    if not command:
        return None
    request = {"command": command, "folder": str(folder)}
    token = argument.get("workDoneToken")
    title = "Recording the inputs of {}"
    return await start(ls, document, name, "record", title, token=token, process=RECORDER, **request)


async def _chosen_program(ls: Server, path: str, name: str) -> str:
    """The program that the user chooses among those that import the file; empty if there is none or the user cancels."""
    root = ls.root_of(path)
    programs = (await asyncio.to_thread(programs_using, Path(path).resolve(), root))[:MAX_PROGRAMS]
    if not programs:
        text = (
            f"No program that calls {name} was found in {root}. Set mtmc.recordCommand to such a program, for example "
            f"`python train.py`, or run `mtmc record -- python train.py` in a terminal."
        )
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, text))
        return ""
    question = lsp.ShowMessageRequestParams(
        lsp.MessageType.Info,
        f"Which program calls {name}? It runs in {root}. Only input shapes and dtypes are recorded, never values. "
        "Set mtmc.recordCommand to use another program.",
        [lsp.MessageActionItem(program) for program in programs],
    )
    answer = await ls.window_show_message_request_async(question)
    return answer.title if answer is not None else ""


async def offer(ls: Server, job: Job) -> None:
    """Ask the user what to do with the recorded calls."""
    calls = answer_calls(job.answer)
    if job.state is not JobState.DONE or calls is None:
        return
    document = ls.document(job.uri)
    outlined = document.outline.find(job.target) if document is not None else None
    if document is None or outlined is None:
        return
    # A directive takes precedence over recorded calls, so do not offer a second one.
    choices = [OPTIMIZE, DONE] if outlined.has_directive else [ADD, OPTIMIZE, DONE]
    note = " Its directive takes precedence." if outlined.has_directive else ""
    question = lsp.ShowMessageRequestParams(
        lsp.MessageType.Info,
        f"{job.target} was {recording_text(job.answer)}. Optimising uses these inputs.{note}",
        [lsp.MessageActionItem(choice) for choice in choices],
    )
    answer = await ls.window_show_message_request_async(question)
    if answer is None:
        return
    if answer.title == ADD:
        edit = directive_edit(ls, job.uri, job.target, calls.calls[0].directive)
        if edit is not None:
            await ls.workspace_apply_edit_async(lsp.ApplyWorkspaceEditParams(edit, "Add a workload directive"))
    elif answer.title == OPTIMIZE and (current_document := ls.document(job.uri)) is not None:
        await start(ls, current_document, job.target, "optimize", TITLES["optimize"])
