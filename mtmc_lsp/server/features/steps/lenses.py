"""Code lenses above a target: its run, the selected step, and what can be done, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from lsprotocol import types as lsp

from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.report.phrases import microseconds
from mtmc_lsp.server.features.steps.wording import outcome, position, step_title
from mtmc_lsp.server.jobs import Job
from mtmc_lsp.server.progress import progress_line
from mtmc_lsp.server.reviews import ReviewState
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document, has_kernels_of_author
from mtmc_lsp.source.outline import OutlineEntry

MOST_TITLE = 36
"""Characters of a step's title; the review page and the tree show it whole."""
Title = tuple[str, str, int | None]
"""Title, command and step."""


def register(server: Server) -> None:
    """Register code lenses."""
    server.feature(lsp.TEXT_DOCUMENT_CODE_LENS, lsp.CodeLensOptions())(code_lenses)


def code_lenses(ls: Server, params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
    """The lenses of a file: for targets with a job, a run, or example inputs."""
    ls.lenses.requested()
    document = ls.document(params.text_document.uri)
    if document is None:
        return []
    lenses: list[lsp.CodeLens] = []
    jobs = {job.target: job for job in reversed(ls.jobs.active) if job.path == document.path}
    review_states = {review_state.review.qualname: review_state for review_state in ls.review_states(document)}
    # The directive above a class is also that of its methods.
    offered = {
        entry.target.qualname for entry in document.outline.targets if entry.has_directive and not entry.is_broken
    }
    if document.syntax_errors:
        offered.clear()
    for entry in document.outline.targets:
        name = entry.target.qualname
        lens_range = document.text.line_range(entry.first_line - 1)
        for title, command, step in _titles(ls, document, entry, jobs.get(name), review_states.get(name), offered):
            argument = {"uri": document.uri, "target": name, **({"step": step} if step is not None else {})}
            lenses.append(lsp.CodeLens(lens_range, command=lsp.Command(title, f"mtmc.{command}", arguments=[argument])))
    return lenses


def _titles(
    ls: Server,
    document: Document,
    entry: OutlineEntry,
    job: Job | None,
    review_state: ReviewState | None,
    offered: Collection[str],
) -> list[Title]:
    name = entry.target.qualname
    titles: list[Title] = []
    if job is not None:
        titles += [(f"⟳ {progress_line(job)}", "jobs", None), ("Cancel", "cancel", None)]
    if review_state is not None:
        titles += _review_titles(ls, review_state, job)
    # After all steps of a run are discarded, the target can be optimised again.
    if not titles and name in offered and name.rpartition(".")[0] not in offered:
        is_kernel = has_kernels_of_author(document, entry)
        titles.append(("Optimize this kernel" if is_kernel else "Optimize to Triton kernel", "optimize", None))
    return titles


def _review_titles(ls: Server, review_state: ReviewState, job: Job | None) -> list[Title]:
    review = review_state.review
    # Steps can be removed while the others are verified.
    is_active = job is not None and job.kind != "certify"
    if review_state.is_stale:
        change = "Changed since it was measured" if review_state.is_changed else review_state.changes[0]
        return [] if is_active else [(f"{change} · Optimize again", "optimize", None)]
    titles: list[Title] = []
    if review_state.pending:
        titles += _pending_titles(ls, review_state, is_active=is_active)
    elif review_state.kept_count:
        titles += _kept_titles(review_state, is_active=is_active)
    if review.status is RunStatus.RUNNING and job is None:
        titles.append(("Go on with the run", "resume", None))
    return titles


def _pending_titles(ls: Server, review_state: ReviewState, *, is_active: bool) -> list[Title]:
    step = review_state.selected
    assert step is not None
    number = step.index
    mark = " · reviewed" if ls.reviews.is_reviewed(review_state.review, step) else ""
    # The commands after the title are to be seen beside a review page, too.
    short = textwrap.shorten(step_title(step), MOST_TITLE, placeholder="…")
    title = f"{position(review_state, step)} {short} · {outcome(step)}{mark}"
    before = review_state.pending.index(step)
    keep = "Keep" if before == 0 else f"Keep these {before + 1}"
    titles: list[Title] = [(title, "diff", number), (keep, "keep", number)]
    if not is_active and review_state.review.original is None:
        titles += [("Discard", "discard", number), ("Retry", "tryAnother", number)]
    titles.append(("Diff", "diff", number))
    if before > 0:
        titles.append(("Previous", "select", review_state.pending[before - 1].index))
    if before + 1 < len(review_state.pending):
        titles.append(("Next", "select", review_state.pending[before + 1].index))
        titles.append((f"Keep all {len(review_state.pending)}", "keepAll", None))
    return titles


def _kept_titles(review_state: ReviewState, *, is_active: bool) -> list[Title]:
    step = review_state.kept_steps[-1]
    count = "1 step" if review_state.kept_count == 1 else f"{review_state.kept_count} steps"
    shown = outcome(step)
    if review_state.review.original is not None and step.timing is not None:
        timing = step.timing
        shown = f"{microseconds(timing.median_us)} · {timing.roofline:.0%} of the roofline · {shown}"
    titles: list[Title] = [(f"✓ {count} kept · {shown}", "diff", step.index), ("Diff", "diff", step.index)]
    if not is_active:
        titles += [("Undo", "undo", step.index), ("Undo all", "undoAll", None)]
    return titles
