"""*Check and repair this kernel*: a job whose edits the client shows for confirmation."""

from __future__ import annotations

from typing import Any

from lsprotocol import types as lsp

from mtmc_lsp.server.edits import apply_text
from mtmc_lsp.server.features.commands import resolve_target, start
from mtmc_lsp.server.jobs import Job
from mtmc_lsp.server.server import REPAIR, Server
from mtmc_lsp.server.text import ERRORS

LABEL = "Repair {}"
CHANGED = "{} was edited while its kernels were repaired, so the repair is not shown. Repair it again."


def register(server: Server) -> None:
    """Register the command and what follows its job."""
    server.command("mtmc.repair")(repair)
    server.job_end_listeners.append(lambda job: offer(server, job))


async def repair(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Start to detect and repair faults of a kernel, or of the kernels that a function launches."""
    document, outlined, argument = resolve_target(ls, arguments)
    token = argument.get("workDoneToken")
    return await start(ls, document, outlined.target.qualname, REPAIR, "Checking {}", token=token)


async def offer(ls: Server, job: Job) -> None:
    """Let the client show the edits of a repair, and apply those that the user confirms."""
    text = job.answer.get("text") if job.answer.get("event") == "repaired" else None
    document = ls.document(job.uri)
    if text is None or document is None:
        return
    if document.text.data != str(job.request["text"]).encode("utf-8", ERRORS):
        message = CHANGED.format(job.target)
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, message))
        return
    await apply_text(ls, document, str(text).encode("utf-8", ERRORS), LABEL.format(job.target), confirm=True)
    # The stored run of the repair shows whether it is kept, and undoes it.
    await ls.load_reviews(document)
    ls.refresh(document.uri)
