"""Review of steps: keep, undo, show the diff, try another.

Only these commands change the file and that of its kernels, by edits that the client applies and can undo. Kept steps are
detected from the texts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.uris import from_fs_path

from mtmc_lsp.capture.module_paths import package_of
from mtmc_lsp.core.errors import Location, MtmcError, SourceSyntaxError
from mtmc_lsp.core.run import Placement, RunStatus, Step
from mtmc_lsp.server.features.commands import resolve_target, start
from mtmc_lsp.server.handshake import DIFF_SCHEME
from mtmc_lsp.server.jobs import JobState
from mtmc_lsp.server.kernels_file.edits import apply_pair
from mtmc_lsp.server.kernels_file.texts import imported_kernels, present_kernels
from mtmc_lsp.server.protocol import shows_content
from mtmc_lsp.server.reviews import ReviewState
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.blocks import BEGIN, END
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.sibling.pair import FilePair, separated, without_block
from mtmc_lsp.source.targets import find_target

REPLACE, CANCEL = "Replace", "Cancel"


def register(server: Server) -> None:
    """Register the review commands."""
    server.command("mtmc.keep")(keep)
    server.command("mtmc.keepAll")(keep_all)
    server.command("mtmc.preview")(preview)
    server.command("mtmc.undo")(undo)
    server.command("mtmc.undoAll")(undo_all)
    server.command("mtmc.diff")(diff)
    server.command("mtmc.tryAnother")(try_another)
    server.command("mtmc.resume")(resume)
    server.feature(lsp.WORKSPACE_TEXT_DOCUMENT_CONTENT)(content)
    server.close_listeners.append(remove_shown)


async def keep(ls: Server, *arguments: Any) -> bool:
    """Write a step and the steps before it to the file: the given step, or the first pending one."""
    document, review_state, argument = await _standing(ls, arguments)
    step = _chosen_step(review_state, argument, review_state.pending[:1] if review_state is not None else ())
    if review_state is None or step is None:
        return _report_nothing(ls, "to keep")
    return await _write_step(ls, document, review_state, step, f"Keep step {step.index}: {step.action.text}")


async def keep_all(ls: Server, *arguments: Any) -> bool:
    """Write all steps to the file."""
    document, review_state, _ = await _standing(ls, arguments)
    if review_state is None or not review_state.pending:
        return _report_nothing(ls, "to keep")
    return await _write_step(
        ls, document, review_state, review_state.pending[-1], f"Keep all {len(review_state.pending)} steps"
    )


async def preview(ls: Server, *arguments: Any) -> bool:
    """Show all steps of the run as an edit to confirm, for clients without their own diff view."""
    document, review_state, _ = await _standing(ls, arguments)
    if review_state is None or not review_state.pending:
        return _report_nothing(ls, "to keep")
    last = review_state.pending[-1]
    return await _write_step(
        ls, document, review_state, last, f"All {len(review_state.pending)} steps of the run", confirm=True
    )


async def undo(ls: Server, *arguments: Any) -> Any:
    """Remove one step and keep the others: the given step, else the first pending one, else the last kept one."""
    document, review_state, argument = await _standing(ls, arguments)
    default = (review_state.pending[:1] or review_state.kept_steps[-1:]) if review_state is not None else ()
    step = _chosen_step(review_state, argument, default)
    if review_state is None or step is None:
        return _report_nothing(ls, "to undo")
    if review_state.is_stale:
        return _report_stale(ls, review_state)
    if review_state.review.accepted[-1] is step and review_state.review.status is not RunStatus.RUNNING:
        return await _undo_last(ls, document, review_state, step)
    return await _revise(ls, document, review_state, step, "undo", "Undoing a step of {}")


async def try_another(ls: Server, *arguments: Any) -> Any:
    """Continue the search from the version before a step, without that step: the given one, or the first pending one.

    A ``remark`` (``make it readable``) is passed to the model, if the run uses one.
    """
    document, review_state, argument = await _standing(ls, arguments)
    step = _chosen_step(review_state, argument, review_state.pending[:1] if review_state is not None else ())
    if review_state is None or step is None:
        return _report_nothing(ls, "to try another for")
    if review_state.is_stale:
        return _report_stale(ls, review_state)
    remark = " ".join(str(argument.get("remark") or "").split())
    return await _revise(ls, document, review_state, step, "another", "Trying another step for {}", remark=remark)


async def undo_all(ls: Server, *arguments: Any) -> bool:
    """Remove all generated kernels of the target from the file."""
    document, outlined, _ = resolve_target(ls, arguments)
    await ls.loaded(document)
    review_state = ls.review_state(document, outlined.target.qualname)
    if (review_state is None or review_state.is_edited) and not await _confirm_replacement(
        ls, outlined.target.qualname
    ):
        return False
    kernels, qualname = imported_kernels(ls, document), outlined.target.qualname
    new = _without_code(document, qualname, kernels)
    if new == FilePair(document.text.data, kernels):
        return _report_not_removable(ls, document, qualname)
    return await apply_pair(ls, document, kernels, new, f"Undo all steps of {qualname}")


async def resume(ls: Server, *arguments: Any) -> Any:
    """Resume an unfinished run."""
    document, review_state, _ = await _standing(ls, arguments)
    if review_state is None or review_state.review.status is not RunStatus.RUNNING:
        return _report_nothing(ls, "to resume")
    target = review_state.review.qualname
    return await start(ls, document, target, "resume", "Optimizing {}", run=review_state.review.run)


async def _standing(ls: Server, arguments: tuple[Any, ...]) -> tuple[Document, ReviewState | None, dict[str, Any]]:
    document, outlined, argument = resolve_target(ls, arguments)
    # After a restart, the client may send a command before the stored runs are loaded.
    await ls.loaded(document)
    return document, ls.review_state(document, outlined.target.qualname), argument


def _chosen_step(review_state: ReviewState | None, argument: dict[str, Any], default: tuple[Step, ...]) -> Step | None:
    if review_state is None:
        return None
    if argument.get("step") is not None:
        return review_state.review.step(int(argument["step"]))
    return default[0] if default else None


def _report_nothing(ls: Server, what: str) -> bool:
    text = f"There is nothing {what}: this function has no matching step."
    ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
    return False


def _report_not_removable(ls: Server, document: Document, qualname: str) -> bool:
    """Say why no generated code can be removed: there is none, or one of its marks is missing."""
    lines = [
        document.text.line(number).decode("utf-8", "replace").strip() for number in range(document.text.line_count)
    ]
    numbers = {mark: lines.index(mark) + 1 for mark in (f"{BEGIN} {qualname}", f"{END} {qualname}") if mark in lines}
    if not numbers:
        return _report_nothing(ls, "to undo")
    (mark, number), *_ = numbers.items()
    other = f"{END} {qualname}" if mark.startswith(BEGIN) else f"{BEGIN} {qualname}"
    text = (
        f"The generated code of {qualname} cannot be removed: `{mark}` in line {number} has no matching line `{other}`."
    )
    text += " Put that line back, or delete the code by hand."
    ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, text))
    return False


def _report_stale(ls: Server, review_state: ReviewState) -> bool:
    if review_state.is_changed:
        text = f"{review_state.stale_description}, so its steps no longer apply. Optimise it again."
    else:
        text = f"{review_state.stale_description}. The steps of {review_state.review.qualname} no longer apply. Optimise again."
    ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, text))
    return False


# Writing to the file -------------------------------------------------------------------------------------------------


async def _write_step(
    ls: Server, document: Document, review_state: ReviewState, step: Step | None, label: str, *, confirm: bool = False
) -> bool:
    """Write the version of a step to the file; ``None`` removes all generated code."""
    if review_state.is_stale:
        return _report_stale(ls, review_state)
    qualname = review_state.review.qualname
    if review_state.is_edited and not await _confirm_replacement(ls, qualname):
        return False
    try:
        kernels, new = composed(ls, document, qualname, step)
    except MtmcError as error:
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, str(error)))
        return False
    return await apply_pair(ls, document, kernels, new, label, confirm=confirm)


def _without_code(document: Document, qualname: str, kernels: bytes | None) -> FilePair:
    """The texts of both files without the generated code of a target."""
    rest = without_block(kernels, qualname) if kernels is not None else None
    return FilePair(strip_generated(document.text.data, qualname), rest)


def composed(ls: Server, document: Document, qualname: str, step: Step | None) -> tuple[bytes | None, FilePair]:
    """The present file of kernels, and the texts of both files with the code of a target replaced by a step's code.

    Raises:
        MtmcError: the code cannot be inserted into the current text, or not go to its place.
    """
    code = step.candidate.code if step is not None and step.candidate is not None else None
    is_beside = code is not None and code.place is Placement.SIBLING
    kernels = present_kernels(ls, document) if is_beside else imported_kernels(ls, document)
    plain = _without_code(document, qualname, kernels)
    original = plain.user
    if code is None:
        return kernels, plain
    new = compose(original, find_target(original, document.path, qualname), code)
    if strip_generated(new, qualname) != original:
        # An unterminated string would swallow the markers. Do not insert code that could not be removed again.
        location = Location(document.path, document.outline.by_name[qualname].target.start_line)
        remedy = "Fix the syntax errors in the file first."
        raise SourceSyntaxError(
            f"the kernel of {qualname} cannot be inserted: it could not be removed again", where=location, remedy=remedy
        )
    if code.place is Placement.SIBLING:
        path = Path(os.path.realpath(document.path))
        return kernels, separated(new, qualname, Path(document.path), package_of(path)[0], kernels)
    return kernels, FilePair(new, plain.kernels)


async def _confirm_replacement(ls: Server, qualname: str) -> bool:
    text = f"The kernel of {qualname} in this file does not match this run: it was edited or is older. Replace it?"
    actions = [lsp.MessageActionItem(REPLACE), lsp.MessageActionItem(CANCEL)]
    question = lsp.ShowMessageRequestParams(lsp.MessageType.Warning, text, actions)
    answer = await ls.window_show_message_request_async(question)
    return answer is not None and answer.title == REPLACE


async def _undo_last(ls: Server, document: Document, review_state: ReviewState, step: Step) -> bool:
    """Undo the last step without a search: the version before it is already verified."""
    review = review_state.review
    # The file may have been moved to another project since the run.
    if not await ls.ensure_trust(review.path):
        return False
    if review_state.kept_count == len(review.accepted):
        previous = review.accepted[-2] if len(review.accepted) > 1 else None
        if previous is not None and previous.is_base:
            previous = None
        if not await _write_step(ls, document, review_state, previous, f"Undo step {step.index}: {step.action.text}"):
            return False

    def note() -> None:
        # Only here: what a search needs takes a while to import, and the server has little time to be ready.
        from mtmc_lsp.app.review import undo_last
        from mtmc_lsp.app.stored_runs import open_store

        with open_store(Path(review.path)) as store:
            undo_last(store, review.run, step.index)

    try:
        await asyncio.to_thread(note)
    except MtmcError as error:
        ls.show_error(error)
        return False
    await ls.load_reviews(document)
    return True


async def _revise(
    ls: Server, document: Document, review_state: ReviewState, step: Step, kind: str, title: str, **request: Any
) -> dict[str, Any] | None:
    """Revise the run without a step. Afterwards, write the steps that were kept before to the file."""
    review = review_state.review
    kept_keys = [s.action.key for s in review_state.kept_steps if s.index != step.index]
    is_kept = step in review_state.kept_steps
    answer = await start(ls, document, review.qualname, kind, title, run=review.run, step=step.index, **request)
    job = ls.jobs.find(answer["job"]) if answer is not None else None
    if job is not None and is_kept:

        async def write_kept_steps() -> None:
            await job.over.wait()
            if job.state is JobState.DONE:
                await _write_kept_steps(
                    ls, document, review.qualname, kept_keys, f"Undo step {step.index}: {step.action.text}"
                )

        ls.background(write_kept_steps())
    return answer


async def _write_kept_steps(ls: Server, document: Document, qualname: str, kept_keys: list[str], label: str) -> None:
    """Write the kept actions of a revised run to the file, up to the first one that failed in the revision."""
    current_document = ls.documents.get(document.uri)
    review_state = ls.review_state(current_document, qualname) if current_document is not None else None
    if current_document is None or review_state is None:
        return
    step = None
    for candidate in review_state.review.accepted:
        if candidate.action.key not in kept_keys:
            break
        step = candidate
    lost_count = len(kept_keys) - (review_state.review.accepted.index(step) + 1 if step is not None else 0)
    if lost_count:
        text = (
            f"{lost_count} of the kept steps of {qualname} did not work without the undone step; see the code lenses."
        )
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, text))
    await _write_step(ls, current_document, review_state, step, label)


# Diffs ---------------------------------------------------------------------------------------------------------------


async def diff(ls: Server, *arguments: Any) -> dict[str, Any] | bool:
    """Show the diff of a step: the given step, else the first pending one, else the last kept one."""
    _, review_state, argument = await _standing(ls, arguments)
    step = _chosen_step(
        review_state,
        argument,
        review_state.pending[:1] or review_state.kept_steps[-1:] if review_state is not None else (),
    )
    if review_state is None or step is None or step.candidate is None:
        return _report_nothing(ls, "to compare")
    earlier_steps = [s for s in review_state.review.accepted if s.index < step.index]
    old_source = earlier_steps[-1].candidate.source if earlier_steps and earlier_steps[-1].candidate else ""
    old_source = old_source or strip_generated(step.candidate.source.encode(), review_state.review.qualname).decode()
    result = {"diff": step.diff, "before": old_source, "after": step.candidate.source, "step": step.index}
    if not ls.options.diff_view:
        await _show(ls, f"{review_state.review.qualname}-step-{step.index}.diff", step.diff)
    return result


async def _show(ls: Server, name: str, text: str) -> None:
    window = ls.client_capabilities.window
    if window is None or window.show_document is None or not window.show_document.support:
        ls.window_log_message(lsp.LogMessageParams(lsp.MessageType.Info, text))
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, f"{name} is in the server's log."))
        return
    if shows_content(ls.client_capabilities):
        uri = f"{DIFF_SCHEME}:/{name}"
        has_changed = ls.shown_documents.get(uri, text) != text
        ls.shown_documents[uri] = text
        if has_changed:
            # An open document may show a step of an earlier run.
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
    """The text of a generated document."""
    return lsp.TextDocumentContentResult(ls.shown_documents.get(params.uri, ""))


def remove_shown(ls: Server) -> None:
    """Remove the temporary files."""
    if ls.shown_folder is not None:
        shutil.rmtree(ls.shown_folder, ignore_errors=True)
