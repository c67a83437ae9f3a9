"""Review of steps: keep, select, show the diff, try another.

Only these commands change the file and that of its kernels, by edits that the client applies and can undo. Kept steps are
detected from the texts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.uris import from_fs_path

from mtmc_lsp.app.revisions.rebase import rebase
from mtmc_lsp.capture.module_paths import package_of
from mtmc_lsp.core.errors import FileChanged, Location, MtmcError, SourceSyntaxError
from mtmc_lsp.core.run import Placement, RunStatus, Step
from mtmc_lsp.server.features.commands import TITLES, resolve_target, start
from mtmc_lsp.server.features.steps.wording import step_title
from mtmc_lsp.server.handshake import DIFF_SCHEME
from mtmc_lsp.server.kernels_file.edits import apply_pair
from mtmc_lsp.server.kernels_file.texts import imported_kernels, present_kernels
from mtmc_lsp.server.protocol import shows_content
from mtmc_lsp.server.reviews import ReviewState, change_of
from mtmc_lsp.server.server import CERTIFY, Server
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.sibling.pair import FilePair, separated, without_block
from mtmc_lsp.source.targets import find_target

REPLACE, CANCEL = "Replace", "Cancel"


def register(server: Server) -> None:
    """Register the review commands."""
    server.command("mtmc.keep")(keep)
    server.command("mtmc.keepAll")(keep_all)
    server.command("mtmc.preview")(preview)
    server.command("mtmc.select")(select)
    server.command("mtmc.markReviewed")(mark_reviewed)
    server.command("mtmc.diff")(diff)
    server.command("mtmc.tryAnother")(try_another)
    server.command("mtmc.resume")(resume)
    server.feature(lsp.WORKSPACE_TEXT_DOCUMENT_CONTENT)(content)
    server.close_listeners.append(remove_shown)


async def keep(ls: Server, *arguments: Any) -> bool:
    """Write a step and the steps before it to the file: the given step, or the selected one."""
    document, review_state, argument = await standing(ls, arguments)
    step = chosen_step(review_state, argument, selected(review_state))
    if review_state is None or step is None:
        return report_nothing(ls, "to keep")
    return await write_step(ls, document, review_state, step, f"Keep: {step_title(step)}")


async def keep_all(ls: Server, *arguments: Any) -> bool:
    """Write all steps to the file."""
    document, review_state, _ = await standing(ls, arguments)
    if review_state is None or not review_state.pending:
        return report_nothing(ls, "to keep")
    return await write_step(
        ls, document, review_state, review_state.pending[-1], f"Keep all {len(review_state.pending)} steps"
    )


async def preview(ls: Server, *arguments: Any) -> bool:
    """Show all steps of the run as an edit to confirm, for clients without their own diff view."""
    document, review_state, _ = await standing(ls, arguments)
    if review_state is None or not review_state.pending:
        return report_nothing(ls, "to keep")
    last = review_state.pending[-1]
    return await write_step(
        ls, document, review_state, last, f"All {len(review_state.pending)} steps of the run", confirm=True
    )


async def try_another(ls: Server, *arguments: Any) -> Any:
    """Continue the search from the version before a step, without that step: the given one, or the selected one.

    A ``remark`` (``make it readable``) is passed to the model, if the run uses one.
    """
    document, review_state, argument = await standing(ls, arguments)
    step = chosen_step(review_state, argument, selected(review_state))
    if review_state is None or step is None:
        return report_nothing(ls, "to retry")
    if review_state.is_stale:
        return report_stale(ls, review_state)
    review = review_state.review
    if any(earlier.verdict is None for earlier in review.accepted if earlier.index < step.index):
        text = f"The steps before this one are not verified yet. Wait for {review.qualname}, then retry."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
        return False
    remark = " ".join(str(argument.get("remark") or "").split())
    title = "Trying another step for {}"
    return await start(ls, document, review.qualname, "another", title, run=review.run, step=step.index, remark=remark)


async def select(ls: Server, *arguments: Any) -> bool:
    """Select the pending step that lenses show, and that commands without a step are about."""
    document, review_state, argument = await standing(ls, arguments)
    step = chosen_step(review_state, argument, ())
    if review_state is None or step not in review_state.pending:
        return report_nothing(ls, "to select")
    ls.reviews.select(review_state.review, step.index)
    ls.refresh(document.uri)
    return True


async def mark_reviewed(ls: Server, *arguments: Any) -> bool:
    """Mark a pending step as reviewed, or take the mark off again: the given step, or the selected one."""
    document, review_state, argument = await standing(ls, arguments)
    step = chosen_step(review_state, argument, selected(review_state))
    if review_state is None or step is None or step not in review_state.pending:
        return report_nothing(ls, "to mark as reviewed")
    review = review_state.review
    is_reviewed = not ls.reviews.is_reviewed(review, step)
    ls.reviews.mark(review, step, is_reviewed=is_reviewed)
    names, change = (review.path, review.qualname), change_of(step)
    await ls.read_store(review.path, lambda store: store.mark_reviewed(*names, change, is_reviewed=is_reviewed))
    ls.refresh(document.uri)
    return True


async def resume(ls: Server, *arguments: Any) -> Any:
    """Resume an unfinished run; start one if there is none."""
    document, review_state, argument = await standing(ls, arguments)
    unfinished = review_state is not None and review_state.review.status is RunStatus.RUNNING
    if review_state is None or not unfinished or ls.is_active(review_state.review):
        return await start(ls, document, str(argument["target"]), "optimize", TITLES["optimize"])
    review = review_state.review
    if any(step.verdict is None for step in review.accepted):
        return await start(ls, document, review.qualname, CERTIFY, "Verifying the steps of {}", run=review.run)
    return await start(ls, document, review.qualname, "resume", TITLES["optimize"], run=review.run)


async def standing(ls: Server, arguments: tuple[Any, ...]) -> tuple[Document, ReviewState | None, dict[str, Any]]:
    """The document and the run of a command, once the stored runs are loaded, and the argument."""
    document, outlined, argument = resolve_target(ls, arguments)
    # After a restart, the client may send a command before the stored runs are loaded.
    await ls.loaded(document)
    return document, ls.review_state(document, outlined.target.qualname), argument


def chosen_step(review_state: ReviewState | None, argument: dict[str, Any], default: tuple[Step, ...]) -> Step | None:
    """The step that the argument names, else the first of the default."""
    if review_state is None:
        return None
    if argument.get("step") is not None:
        return review_state.review.step(int(argument["step"]))
    return default[0] if default else None


def selected(review_state: ReviewState | None) -> tuple[Step, ...]:
    """The selected step, for commands without a step."""
    return (review_state.selected,) if review_state is not None and review_state.selected is not None else ()


def report_nothing(ls: Server, what: str) -> bool:
    """Tell the user that no step fits the command."""
    text = f"There is nothing {what}: this function has no matching step."
    ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
    return False


def report_stale(ls: Server, review_state: ReviewState) -> bool:
    """Tell the user that the run no longer applies."""
    if review_state.is_changed:
        text = f"{review_state.stale_description}, so its steps no longer apply. Optimise it again."
    else:
        text = f"{review_state.stale_description}. The steps of {review_state.review.qualname} no longer apply. Optimise again."
    ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, text))
    return False


# Writing to the file -------------------------------------------------------------------------------------------------


async def write_step(
    ls: Server, document: Document, review_state: ReviewState, step: Step | None, label: str, *, confirm: bool = False
) -> bool:
    """Write the version of a step to the file; ``None`` removes all generated code."""
    if review_state.is_stale:
        return report_stale(ls, review_state)
    qualname = review_state.review.qualname
    if review_state.is_edited and not await confirm_replacement(ls, qualname):
        return False
    try:
        kernels, new = composed(ls, document, qualname, step)
    except MtmcError as error:
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, str(error)))
        return False
    return await apply_pair(ls, document, kernels, new, label, confirm=confirm)


def without_code(document: Document, qualname: str, kernels: bytes | None) -> FilePair:
    """The texts of both files without the generated code of a target."""
    rest = without_block(kernels, qualname) if kernels is not None else None
    return FilePair(strip_generated(document.text.data, qualname), rest)


def composed(ls: Server, document: Document, qualname: str, step: Step | None) -> tuple[bytes | None, FilePair]:
    """The present file of kernels, and the texts of both files with the code of a target replaced by a step's code.

    Raises:
        MtmcError: the code cannot be inserted into the current text, or not go to its place.
    """
    state = ls.review_state(document, qualname)
    if state is not None and state.review.original is not None:
        return _edited(ls, document, state, step)
    code = step.candidate.code if step is not None and step.candidate is not None else None
    is_beside = code is not None and code.place is Placement.SIBLING
    kernels = present_kernels(ls, document) if is_beside else imported_kernels(ls, document)
    plain = without_code(document, qualname, kernels)
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


def _edited(ls: Server, document: Document, state: ReviewState, step: Step | None) -> tuple[bytes | None, FilePair]:
    """The texts with the edits of kernels up to a step; ``None`` takes all of them back."""
    review, text = state.review, document.text.data.decode("utf-8", "surrogatepass")
    wanted = step.candidate.source if step is not None and step.candidate is not None else review.version(0)
    new = rebase(review.version(state.kept_count), wanted, text)
    if new is None:
        location = Location(document.path, state.outlined.target.start_line)
        raise FileChanged(
            f"lines that the run of {review.qualname} edits changed since",
            where=location,
            remedy="Undo your changes of these lines, or optimise it again.",
        )
    kernels = imported_kernels(ls, document)
    return kernels, FilePair(new.encode("utf-8", "surrogatepass"), kernels)


async def confirm_replacement(ls: Server, qualname: str) -> bool:
    """Whether the user agrees to replace code that is of no known run."""
    text = f"The kernel of {qualname} in this file does not match this run: it was edited or is older. Replace it?"
    actions = [lsp.MessageActionItem(REPLACE), lsp.MessageActionItem(CANCEL)]
    question = lsp.ShowMessageRequestParams(lsp.MessageType.Warning, text, actions)
    answer = await ls.window_show_message_request_async(question)
    return answer is not None and answer.title == REPLACE


# Diffs ---------------------------------------------------------------------------------------------------------------


async def diff(ls: Server, *arguments: Any) -> dict[str, Any] | bool:
    """Show the diff of a step: the given step, else the first pending one, else the last kept one."""
    _, review_state, argument = await standing(ls, arguments)
    step = chosen_step(
        review_state,
        argument,
        selected(review_state) or (review_state.kept_steps[-1:] if review_state is not None else ()),
    )
    if review_state is None or step is None or step.candidate is None:
        return report_nothing(ls, "to compare")
    earlier_steps = [s for s in review_state.review.accepted if s.index < step.index]
    old_source = earlier_steps[-1].candidate.source if earlier_steps and earlier_steps[-1].candidate else ""
    old_source = old_source or review_state.review.original or ""
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
