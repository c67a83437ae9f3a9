"""Deciding on steps: keep, undo, look at the difference, ask for another.

The file changes here alone, by edits that the client makes and can undo. Which steps are kept is read off its text.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.uris import from_fs_path

from mtmc_lsp.core.errors import Location, MtmcError, SourceSyntaxError
from mtmc_lsp.core.run import RunStatus, Step
from mtmc_lsp.server.edits import apply
from mtmc_lsp.server.features.commands import place, start
from mtmc_lsp.server.handshake import DIFF_SCHEME
from mtmc_lsp.server.jobs import JobState
from mtmc_lsp.server.protocol import shows_content
from mtmc_lsp.server.reviews import Standing
from mtmc_lsp.server.server import Document, Server
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.targets import find_target

REPLACE, LEAVE = "Replace it", "Leave it"


def register(server: Server) -> None:
    """Register the commands of review."""
    server.command("mtmc.keep")(keep)
    server.command("mtmc.keepAll")(keep_all)
    server.command("mtmc.preview")(preview)
    server.command("mtmc.undo")(undo)
    server.command("mtmc.undoAll")(undo_all)
    server.command("mtmc.diff")(diff)
    server.command("mtmc.tryAnother")(try_another)
    server.command("mtmc.resume")(resume)
    server.feature(lsp.WORKSPACE_TEXT_DOCUMENT_CONTENT)(content)
    server.closers.append(remove_shown)


async def keep(ls: Server, *arguments: Any) -> bool:
    """Put a step, and those before it, into the file: the one named, or the first that waits."""
    document, standing, given = await _standing(ls, arguments)
    step = _chosen(standing, given, standing.pending[:1] if standing is not None else ())
    if standing is None or step is None:
        return _nothing(ls, "to keep")
    return await _put(ls, document, standing, step, f"Keep step {step.index}: {step.action.text}")


async def keep_all(ls: Server, *arguments: Any) -> bool:
    """Put every step into the file."""
    document, standing, _ = await _standing(ls, arguments)
    if standing is None or not standing.pending:
        return _nothing(ls, "to keep")
    return await _put(ls, document, standing, standing.pending[-1], f"Keep all {len(standing.pending)} steps")


async def preview(ls: Server, *arguments: Any) -> bool:
    """Show the whole run as an edit to be confirmed, for clients without a diff of their own."""
    document, standing, _ = await _standing(ls, arguments)
    if standing is None or not standing.pending:
        return _nothing(ls, "to keep")
    last = standing.pending[-1]
    return await _put(ls, document, standing, last, f"The whole run: {len(standing.pending)} steps", confirm=True)


async def undo(ls: Server, *arguments: Any) -> Any:
    """Take one step out and leave the others in place: the one named, else the first that waits, else the last kept."""
    document, standing, given = await _standing(ls, arguments)
    usual = (standing.pending[:1] or standing.kept_steps[-1:]) if standing is not None else ()
    step = _chosen(standing, given, usual)
    if standing is None or step is None:
        return _nothing(ls, "to undo")
    if standing.is_stale:
        return _stale(ls, standing)
    if standing.review.accepted[-1] is step and standing.review.status is not RunStatus.RUNNING:
        return await _undo_last(ls, document, standing, step)
    return await _revise(ls, document, standing, step, "undo", "Undoing a step of {}")


async def try_another(ls: Server, *arguments: Any) -> Any:
    """Search on from the version before a step, without that step: the one named, or the first that waits.

    A ``remark`` (``make it readable``) is for the model, where one takes part.
    """
    document, standing, given = await _standing(ls, arguments)
    step = _chosen(standing, given, standing.pending[:1] if standing is not None else ())
    if standing is None or step is None:
        return _nothing(ls, "to try another for")
    if standing.is_stale:
        return _stale(ls, standing)
    remark = " ".join(str(given.get("remark") or "").split())
    return await _revise(ls, document, standing, step, "another", "Trying another step for {}", remark=remark)


async def undo_all(ls: Server, *arguments: Any) -> bool:
    """Take every kernel that was generated for the target out of the file."""
    document, found, _ = place(ls, arguments)
    await ls.loaded(document)
    standing = ls.standing(document, found.target.qualname)
    if (standing is None or standing.is_edited) and not await _may_replace(ls, found.target.qualname):
        return False
    new = strip_generated(document.text.data, found.target.qualname)
    return await apply(ls, document, new, f"Undo all steps of {found.target.qualname}")


async def resume(ls: Server, *arguments: Any) -> Any:
    """Go on with a run that was ended before it was done."""
    document, standing, _ = await _standing(ls, arguments)
    if standing is None or standing.review.status is not RunStatus.RUNNING:
        return _nothing(ls, "to go on with")
    target = standing.review.qualname
    return await start(ls, document, target, "resume", "Optimizing {}", run=standing.review.run)


async def _standing(ls: Server, arguments: tuple[Any, ...]) -> tuple[Document, Standing | None, dict[str, Any]]:
    document, found, given = place(ls, arguments)
    # A client that was told of a restart may ask before its runs are back.
    await ls.loaded(document)
    return document, ls.standing(document, found.target.qualname), given


def _chosen(standing: Standing | None, given: dict[str, Any], usual: tuple[Step, ...]) -> Step | None:
    if standing is None:
        return None
    if given.get("step") is not None:
        return standing.review.step(int(given["step"]))
    return usual[0] if usual else None


def _nothing(ls: Server, what: str) -> bool:
    text = f"There is nothing {what}: no step of this function waits for a decision."
    ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
    return False


def _stale(ls: Server, standing: Standing) -> bool:
    if standing.is_changed:
        text = f"{standing.why_stale}, so its steps no longer fit; optimise it again."
    else:
        text = f"{standing.why_stale}. The steps of {standing.review.qualname} no longer fit; optimise it again."
    ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, text))
    return False


# Into the file -------------------------------------------------------------------------------------------------------


async def _put(
    ls: Server, document: Document, standing: Standing, step: Step | None, label: str, *, confirm: bool = False
) -> bool:
    """Make the file hold the version of a step; for ``None`` the user's own text alone."""
    if standing.is_stale:
        return _stale(ls, standing)
    qualname = standing.review.qualname
    if standing.is_edited and not await _may_replace(ls, qualname):
        return False
    try:
        new = composed(document, qualname, step)
    except MtmcError as error:
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, str(error)))
        return False
    return await apply(ls, document, new, label, confirm=confirm)


def composed(document: Document, qualname: str, step: Step | None) -> bytes:
    """The document's text with a step's code for a target in place of what is generated for it now.

    Raises:
        MtmcError: there is no place for it in the present text.
    """
    plain = strip_generated(document.text.data, qualname)
    code = step.candidate.code if step is not None and step.candidate is not None else None
    if code is None:
        return plain
    new = compose(plain, find_target(plain, document.path, qualname), code)
    if strip_generated(new, qualname) != plain:
        # An open string elsewhere makes the marks a part of it, and what cannot be taken out must not be put in.
        where = Location(document.path, document.outline.by_name[qualname].target.start_line)
        remedy = "Mend the syntax errors in the file first."
        raise SourceSyntaxError(f"the kernel of {qualname} could not be taken out again", where=where, remedy=remedy)
    return new


async def _may_replace(ls: Server, qualname: str) -> bool:
    text = f"The kernel of {qualname} in this file is none of this run's: it was edited, or is older. Replace it?"
    actions = [lsp.MessageActionItem(REPLACE), lsp.MessageActionItem(LEAVE)]
    question = lsp.ShowMessageRequestParams(lsp.MessageType.Warning, text, actions)
    answer = await ls.window_show_message_request_async(question)
    return answer is not None and answer.title == REPLACE


async def _undo_last(ls: Server, document: Document, standing: Standing, step: Step) -> bool:
    """The last step needs no search: the version before it was verified already."""
    review = standing.review
    # The file may have moved into another project since the run.
    if not await ls.ensure_trust(review.path):
        return False
    if standing.kept == len(review.accepted):
        before = review.accepted[-2] if len(review.accepted) > 1 else None
        if before is not None and before.is_base:
            before = None
        if not await _put(ls, document, standing, before, f"Undo step {step.index}: {step.action.text}"):
            return False

    def note() -> None:
        # Only here: what a search needs takes a while to import, and the server has little time to be ready.
        from mtmc_lsp.app.review import undo_last
        from mtmc_lsp.app.stored_runs import open_store

        with open_store(Path(review.path)) as store:
            undo_last(store, review.run, step.index)

    await asyncio.to_thread(note)
    await ls.load_reviews(document)
    return True


async def _revise(
    ls: Server, document: Document, standing: Standing, step: Step, kind: str, title: str, **request: Any
) -> dict[str, Any] | None:
    """Have the run written anew without a step; when it is there, the file gets what it kept of it."""
    review = standing.review
    kept = [s.action.key for s in standing.kept_steps if s.index != step.index]
    is_kept = step in standing.kept_steps
    answer = await start(ls, document, review.qualname, kind, title, run=review.run, step=step.index, **request)
    job = ls.jobs.find(answer["job"]) if answer is not None else None
    if job is not None and is_kept:

        async def then() -> None:
            await job.over.wait()
            if job.state is JobState.DONE:
                await _put_anew(ls, document, review.qualname, kept, f"Undo step {step.index}: {step.action.text}")

        ls.background(then())
    return answer


async def _put_anew(ls: Server, document: Document, qualname: str, kept: list[str], label: str) -> None:
    """The kept actions of a run that was written anew, as far as they could be."""
    present = ls.documents.get(document.uri)
    standing = ls.standing(present, qualname) if present is not None else None
    if present is None or standing is None:
        return
    step = None
    for candidate in standing.review.accepted:
        if candidate.action.key not in kept:
            break
        step = candidate
    lost = len(kept) - (standing.review.accepted.index(step) + 1 if step is not None else 0)
    if lost:
        text = f"{lost} of the kept steps of {qualname} did not stand without the one that was undone; see the lenses."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, text))
    await _put(ls, present, standing, step, label)


# Differences ---------------------------------------------------------------------------------------------------------


async def diff(ls: Server, *arguments: Any) -> dict[str, Any] | bool:
    """Show what a step changes: the one named, else the first that waits, else the last kept."""
    _, standing, given = await _standing(ls, arguments)
    step = _chosen(standing, given, standing.pending[:1] or standing.kept_steps[-1:] if standing is not None else ())
    if standing is None or step is None or step.candidate is None:
        return _nothing(ls, "to look at")
    before = [s for s in standing.review.accepted if s.index < step.index]
    old = before[-1].candidate.source if before and before[-1].candidate else ""
    old = old or strip_generated(step.candidate.source.encode(), standing.review.qualname).decode()
    answer = {"diff": step.diff, "before": old, "after": step.candidate.source, "step": step.index}
    if not ls.options.diff_view:
        await _show(ls, f"{standing.review.qualname}-step-{step.index}.diff", step.diff)
    return answer


async def _show(ls: Server, name: str, text: str) -> None:
    window = ls.client_capabilities.window
    if window is None or window.show_document is None or not window.show_document.support:
        ls.window_log_message(lsp.LogMessageParams(lsp.MessageType.Info, text))
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, f"{name} is in the server's log."))
        return
    if shows_content(ls.client_capabilities):
        uri = f"{DIFF_SCHEME}:/{name}"
        is_another = ls.has_shown.get(uri, text) != text
        ls.has_shown[uri] = text
        if is_another:
            # A document that is still open shows an earlier run's step.
            ls.workspace_text_document_content_refresh(lsp.TextDocumentContentRefreshParams(uri))
    else:
        ls.shown_folder = ls.shown_folder or Path(tempfile.mkdtemp(prefix="mtmc-diff-"))
        path = ls.shown_folder / name
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        path.chmod(0o400)
        uri = from_fs_path(str(path)) or ""
    await ls.window_show_document_async(lsp.ShowDocumentParams(uri, take_focus=True))


def content(ls: Server, params: lsp.TextDocumentContentParams) -> lsp.TextDocumentContentResult:
    """The text of a document of ours."""
    return lsp.TextDocumentContentResult(ls.has_shown.get(params.uri, ""))


def remove_shown(ls: Server) -> None:
    """Remove the files made to be looked at."""
    if ls.shown_folder is not None:
        shutil.rmtree(ls.shown_folder, ignore_errors=True)
