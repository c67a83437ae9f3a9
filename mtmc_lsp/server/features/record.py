"""*Record inputs from a command*: run the user's program, note how the target is called in it, and offer that as its workload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp

from mtmc_lsp.process.isolation import isolated_command
from mtmc_lsp.server.features.code_actions import directive_edit
from mtmc_lsp.server.features.commands import TITLES, place, start
from mtmc_lsp.server.jobs import Job, JobState
from mtmc_lsp.server.progress import answer_calls, recorded_words
from mtmc_lsp.server.server import Server
from mtmc_lsp.source.entry_points import programs_using

RECORDER = isolated_command("mtmc_lsp.server.recorder")
MOST_PROGRAMS = 4
"""Offered to choose from: clients show them as buttons."""
ADD, OPTIMIZE, DONE = "Add it as a directive", "Optimize now", "Done"


def register(server: Server) -> None:
    """Register the command, and what follows on it."""
    server.command("mtmc.record")(record)
    server.enders.append(lambda job: offer(server, job))


async def record(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Run the command that is named, else the one of the settings, else the one that the user chooses."""
    document, found, given = place(ls, arguments)
    name, folder = found.target.qualname, ls.root_of(document.path)
    settings = await ls.settings_of(document.uri)
    command = str(given.get("command") or "") or settings.record_command or await _chosen(ls, document.path, name)
    if not command:
        return None
    more = {"command": command, "folder": str(folder)}
    token = given.get("workDoneToken")
    title = "Recording the inputs of {}"
    return await start(ls, document, name, "record", title, token=token, process=RECORDER, **more)


async def _chosen(ls: Server, path: str, name: str) -> str:
    """The program that the user chooses of those that use the file; empty where there is none, or none is wanted."""
    root = ls.root_of(path)
    programs = (await asyncio.to_thread(programs_using, Path(path).resolve(), root))[:MOST_PROGRAMS]
    if not programs:
        text = (
            f"No program in {root} is known to call {name}. Set mtmc.recordCommand to the one that does, as in "
            f"`python train.py`, or run `mtmc record -- python train.py` in a terminal."
        )
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, text))
        return ""
    question = lsp.ShowMessageRequestParams(
        lsp.MessageType.Info,
        f"Which program calls {name}? It runs in {root}, and the shapes of the inputs are noted, never their contents. "
        "The setting mtmc.recordCommand names another.",
        [lsp.MessageActionItem(program) for program in programs],
    )
    answer = await ls.window_show_message_request_async(question)
    return answer.title if answer is not None else ""


async def offer(ls: Server, job: Job) -> None:
    """Ask what is to become of the calls that were noted."""
    calls = answer_calls(job.answer)
    if job.state is not JobState.DONE or calls is None:
        return
    document = ls.document(job.uri)
    found = document.outline.find(job.target) if document is not None else None
    if document is None or found is None:
        return
    # A directive goes before what was recorded, so a second one helps nobody.
    choices = [OPTIMIZE, DONE] if found.has_directive else [ADD, OPTIMIZE, DONE]
    beside = " Its directive is used before them." if found.has_directive else ""
    question = lsp.ShowMessageRequestParams(
        lsp.MessageType.Info,
        f"{job.target} was {recorded_words(job.answer)}. Optimising uses these inputs.{beside}",
        [lsp.MessageActionItem(choice) for choice in choices],
    )
    answer = await ls.window_show_message_request_async(question)
    if answer is None:
        return
    if answer.title == ADD:
        edit = directive_edit(ls, job.uri, job.target, calls.calls[0].directive)
        if edit is not None:
            await ls.workspace_apply_edit_async(lsp.ApplyWorkspaceEditParams(edit, "Add a workload directive"))
    elif answer.title == OPTIMIZE and (present := ls.document(job.uri)) is not None:
        await start(ls, present, job.target, "optimize", TITLES["optimize"])
