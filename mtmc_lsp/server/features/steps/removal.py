"""Taking steps out: a pending step is discarded, a kept one is undone.

The steps after it are written again from the stored graph, which takes milliseconds. A job of the kind ``certify`` verifies them
afterwards. If one of the kept steps fails that, the file gets the last verified version.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.run import Step
from mtmc_lsp.search.store import Store
from mtmc_lsp.server.features.commands import resolve_target, start
from mtmc_lsp.server.features.steps.review import (
    chosen_step,
    confirm_replacement,
    report_nothing,
    report_stale,
    selected,
    standing,
    without_code,
    write_step,
)
from mtmc_lsp.server.features.steps.wording import step_title
from mtmc_lsp.server.jobs import Job, JobState
from mtmc_lsp.server.kernels_file.edits import apply_pair
from mtmc_lsp.server.kernels_file.texts import imported_kernels
from mtmc_lsp.server.reviews import Review, ReviewState
from mtmc_lsp.server.server import CERTIFY, Server
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.blocks import BEGIN, END
from mtmc_lsp.source.sibling.pair import FilePair

IN_ORDER = "Edits of a kernel build on one another. Keep the ones before this edit, or undo the kept ones."
VERIFYING = "Verifying the steps of {}"


def register(server: Server) -> None:
    """Register the commands that take steps out."""
    server.command("mtmc.discard")(discard)
    server.command("mtmc.undo")(undo)
    server.command("mtmc.undoAll")(undo_all)
    server.change_listeners.append(lambda document: follow_text(server, document))


async def discard(ls: Server, *arguments: Any) -> Any:
    """Discard a pending step and keep the others pending: the given step, or the selected one."""
    document, review_state, argument = await standing(ls, arguments)
    step = chosen_step(review_state, argument, selected(review_state))
    if review_state is None or step is None or step not in review_state.pending:
        return report_nothing(ls, "to discard")
    if review_state.review.original is not None:
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, IN_ORDER))
        return False
    return await _remove(ls, document, review_state, step)


async def undo(ls: Server, *arguments: Any) -> Any:
    """Undo a kept step and keep the others: the given step, or the last kept one."""
    document, review_state, argument = await standing(ls, arguments)
    step = chosen_step(review_state, argument, review_state.kept_steps[-1:] if review_state is not None else ())
    if review_state is None or step is None or step not in review_state.kept_steps:
        return report_nothing(ls, "to undo")
    if review_state.review.original is not None:
        # Later edits of the same kernel build on this one.
        kept = review_state.kept_steps
        before = kept[kept.index(step) - 1] if step is not kept[0] else None
        return await write_step(ls, document, review_state, before, f"Undo: {step_title(step)}")
    return await _remove(ls, document, review_state, step)


async def undo_all(ls: Server, *arguments: Any) -> bool:
    """Remove all generated kernels of the target from the file."""
    document, outlined, _ = resolve_target(ls, arguments)
    await ls.loaded(document)
    review_state = ls.review_state(document, outlined.target.qualname)
    if (review_state is None or review_state.is_edited) and not await confirm_replacement(ls, outlined.target.qualname):
        return False
    if review_state is not None and review_state.review.original is not None:
        return await write_step(ls, document, review_state, None, f"Undo all edits of {outlined.target.qualname}")
    kernels, qualname = imported_kernels(ls, document), outlined.target.qualname
    new = without_code(document, qualname, kernels)
    if new == FilePair(document.text.data, kernels):
        return _report_not_removable(ls, document, qualname)
    return await apply_pair(ls, document, kernels, new, f"Undo all steps of {qualname}")


def follow_text(ls: Server, document: Document) -> None:
    """After undo (or redo) in the editor, return to the run whose steps the text contains, also in the store."""
    for review in ls.reviews.follow(document.path, document.outline, imported_kernels(ls, document)):
        ls.background(ls.read_store(review.path, partial(_make_newest, review)))
        ls.refresh(document.uri)


def _make_newest(review: Review, store: Store) -> None:
    store.set_started(review.run, review.started)


async def _remove(ls: Server, document: Document, review_state: ReviewState, step: Step) -> Any:
    """Take one step out of the run, and of the file if it is kept there."""
    review = review_state.review
    if review_state.is_stale:
        return report_stale(ls, review_state)
    if ls.is_active(review):
        text = f"The run of {review.qualname} is still active. Wait for it, or cancel it."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
        return False
    # The file may have been moved to another project since the run.
    if not await ls.ensure_trust(review.path):
        return False
    is_kept = step in review_state.kept_steps

    def write() -> tuple[bool, bool]:
        # Only here: the coder takes a while to import, and the server has little time to be ready.
        from mtmc_lsp.app.revisions.recompose import DISCARDED, UNDONE, without_step
        from mtmc_lsp.app.stored_runs import open_store

        with open_store(Path(review.path)) as store:
            written = without_step(store, review.run, step.index, UNDONE if is_kept else DISCARDED)
            return written is not None, written is not None and written.is_verified

    try:
        is_written, is_verified = await asyncio.to_thread(write)
    except MtmcError as error:
        ls.show_error(error)
        return False
    label = f"{'Undo' if is_kept else 'Discard'}: {step_title(step)}"
    if not is_written:
        return await _revise(ls, document, review_state, step, label)
    await ls.load_reviews(document)
    kept_keys = [s.action.key for s in review_state.kept_steps if s is not step]
    if is_kept:
        await _write_kept_steps(ls, document.uri, review.qualname, kept_keys, label)
        ls.reviews.put_earlier(review)
    if not is_verified:
        # An earlier verification is of a run that no longer counts. It may take seconds to end.
        begin = _certify(ls, document.uri, document.path, review.qualname)
        if ls.jobs.for_target(document.path, review.qualname) is None:
            await begin
        else:
            ls.background(begin)
    return True


async def _certify(ls: Server, uri: str, path: str, qualname: str) -> None:
    """Start to verify the steps of the newest run. If a kept one fails, the file gets the version before it."""
    while (active := ls.jobs.for_target(path, qualname)) is not None:
        if active.kind == CERTIFY:
            await ls.jobs.cancel(active)
        await active.over.wait()
    document, review = ls.document(uri), ls.reviews.get(path, qualname)
    if document is None or review is None or all(step.verdict is not None for step in review.accepted):
        return
    answer = await start(ls, document, qualname, CERTIFY, VERIFYING, run=review.run)
    job = ls.jobs.find(answer["job"]) if answer is not None else None
    if job is not None:
        ls.background(_take_back_failed(ls, job, review))


async def _take_back_failed(ls: Server, job: Job, unverified: Review) -> None:
    """After the verification, write the last verified version to a file that holds a step that failed it."""
    await job.over.wait()
    uri, qualname = job.uri, job.target
    document = ls.document(uri) if job.state is JobState.DONE else None
    before = ls.reviews.review_state(unverified, document.outline, imported_kernels(ls, document)) if document else None
    after = ls.review_state(document, qualname) if document is not None else None
    if before is None or after is None or len(before.kept_steps) == len(after.kept_steps):
        return
    await _write_kept_steps(
        ls, uri, qualname, [s.action.key for s in before.kept_steps], f"Verified steps of {qualname}"
    )


async def _revise(ls: Server, document: Document, review_state: ReviewState, step: Step, label: str) -> Any:
    """Search again without a step, where it cannot be written from the store. Afterwards, write the steps that were kept."""
    review = review_state.review
    kept_keys = [s.action.key for s in review_state.kept_steps if s is not step]
    title = "Removing a step of {}"
    answer = await start(ls, document, review.qualname, "undo", title, run=review.run, step=step.index)
    job = ls.jobs.find(answer["job"]) if answer is not None else None
    if job is not None and step in review_state.kept_steps:

        async def write_kept_steps() -> None:
            await job.over.wait()
            if job.state is JobState.DONE:
                await _write_kept_steps(ls, document.uri, review.qualname, kept_keys, label)

        ls.background(write_kept_steps())
    return answer


async def _write_kept_steps(ls: Server, uri: str, qualname: str, kept_keys: list[str], label: str) -> None:
    """Write the kept steps of a changed run to the file. Writing stops before the first step that no longer works."""
    document = ls.document(uri)
    review_state = ls.review_state(document, qualname) if document is not None else None
    if document is None or review_state is None:
        return
    accepted = review_state.review.accepted
    step = None
    for candidate in accepted:
        if candidate.action.key not in kept_keys:
            break
        step = candidate
    lost = len(kept_keys) - (accepted.index(step) + 1 if step is not None else 0)
    if lost:
        steps = "one more kept step" if lost == 1 else f"{lost} more kept steps"
        text = f"Without the removed step, {steps} of {qualname} did not work, and left the file too."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Warning, text))
    await write_step(ls, document, review_state, step, label)


def _report_not_removable(ls: Server, document: Document, qualname: str) -> bool:
    """Say why no generated code can be removed: there is none, or one of its marks is missing."""
    lines = [
        document.text.line(number).decode("utf-8", "replace").strip() for number in range(document.text.line_count)
    ]
    numbers = {mark: lines.index(mark) + 1 for mark in (f"{BEGIN} {qualname}", f"{END} {qualname}") if mark in lines}
    if not numbers:
        return report_nothing(ls, "to undo")
    (mark, number), *_ = numbers.items()
    other = f"{END} {qualname}" if mark.startswith(BEGIN) else f"{BEGIN} {qualname}"
    text = (
        f"The generated code of {qualname} cannot be removed: `{mark}` in line {number} has no matching line `{other}`."
    )
    text += " Put that line back, or delete the code by hand."
    ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, text))
    return False
