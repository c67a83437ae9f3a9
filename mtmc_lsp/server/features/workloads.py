"""Offers ways to add example inputs after a run failed without them, unless the client offers this."""

from __future__ import annotations

from lsprotocol import types as lsp

from mtmc_lsp.server.features.commands import add_workload
from mtmc_lsp.server.features.record import record
from mtmc_lsp.server.jobs import Job
from mtmc_lsp.server.progress import lacks_workload
from mtmc_lsp.server.server import Server

DIRECTIVE, RECORD = "Add a workload directive", "Record inputs from a command"


def register(server: Server) -> None:
    """Register the question after such a run."""
    server.job_end_listeners.append(lambda job: offer(server, job))


async def offer(ls: Server, job: Job) -> None:
    """Ask the user how to provide inputs."""
    if not lacks_workload(job) or ls.options.offers_workload:
        return
    question = lsp.ShowMessageRequestParams(
        lsp.MessageType.Warning,
        f"{job.target} cannot be run: {job.answer['error']['message']}.",
        [lsp.MessageActionItem(DIRECTIVE), lsp.MessageActionItem(RECORD)],
    )
    answer = await ls.window_show_message_request_async(question)
    document = ls.document(job.uri)
    if answer is None or document is None or document.outline.find(job.target) is None:
        return
    argument = {"uri": job.uri, "target": job.target}
    await (add_workload if answer.title == DIRECTIVE else record)(ls, argument)
