"""Code lenses above a target: the next step to review, and its actions."""

from __future__ import annotations

from lsprotocol import types as lsp

from mtmc_lsp.core.run import RunStatus, Step
from mtmc_lsp.report.phrases import speedup_text
from mtmc_lsp.server.jobs import Job
from mtmc_lsp.server.reviews import ReviewState
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document


def register(server: Server) -> None:
    """Register code lenses."""
    server.feature(lsp.TEXT_DOCUMENT_CODE_LENS, lsp.CodeLensOptions())(code_lenses)


def code_lenses(ls: Server, params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
    """The lenses of a file, for targets with a job or a run."""
    document = ls.document(params.text_document.uri)
    if document is None:
        return []
    lenses: list[lsp.CodeLens] = []
    jobs = {job.target: job for job in reversed(ls.jobs.active) if job.path == document.path}
    review_states = {review_state.review.qualname: review_state for review_state in ls.review_states(document)}
    for target in document.outline.targets:
        name = target.target.qualname
        job, review_state = jobs.get(name), review_states.get(name)
        if job is not None or review_state is not None:
            lenses += _target_lenses(document, target.first_line - 1, name, job, review_state)
    return lenses


def _target_lenses(
    document: Document, line: int, name: str, job: Job | None, review_state: ReviewState | None
) -> list[lsp.CodeLens]:
    titles: list[tuple[str, str, int | None]] = []
    """Title, command and step."""
    if job is not None:
        stage = f"step {job.step}: {job.action}: {job.stage}" if job.step else job.stage
        titles.append((f"⟳ {stage}", "jobs", None))
        titles.append(("Cancel", "cancel", None))
    if review_state is not None:
        titles += _review_titles(review_state, is_active=job is not None)
    lens_range = document.text.line_range(line)
    return [
        lsp.CodeLens(
            lens_range, command=lsp.Command(title, f"mtmc.{command}", arguments=[_argument(document, name, step)])
        )
        for title, command, step in titles
    ]


def _argument(document: Document, name: str, step: int | None) -> dict[str, object]:
    return {"uri": document.uri, "target": name, **({"step": step} if step is not None else {})}


def _review_titles(review_state: ReviewState, *, is_active: bool) -> list[tuple[str, str, int | None]]:
    review = review_state.review
    if review_state.is_stale:
        change = "changed since it was measured" if review_state.is_changed else review_state.changes[0]
        return [] if is_active else [(f"{change} · Optimize again", "optimize", None)]
    titles: list[tuple[str, str, int | None]] = []
    if review_state.pending:
        step = review_state.pending[0]
        number = step.index
        titles += [(step_title(review_state, step), "diff", number), ("Diff", "diff", number), ("Keep", "keep", number)]
        if not is_active:
            titles += [("Undo", "undo", number), ("Try another", "tryAnother", number)]
        titles.append(("Keep all", "keepAll", None))
    elif review_state.kept_count:
        step = review_state.kept_steps[-1]
        count_text = "1 step" if review_state.kept_count == 1 else f"{review_state.kept_count} steps"
        titles += [(f"✓ {count_text} kept · {outcome(step)}", "diff", step.index), ("Diff", "diff", step.index)]
        if not is_active:
            titles += [("Undo", "undo", step.index), ("Undo all", "undoAll", None)]
    if review.status is RunStatus.RUNNING and not is_active:
        titles.append(("Resume the run", "resume", None))
    return titles


def step_title(review_state: ReviewState, step: Step) -> str:
    """``▶ step 2 of 5 · fuse bias+gelu · 1.83x (1.79 to 1.86) over eager · verified``."""
    number = review_state.review.accepted.index(step) + 1
    return f"▶ step {number} of {len(review_state.review.accepted)} · {step.action.text} · {outcome(step)}"


def outcome(step: Step) -> str:
    """Speed and verification status of a step."""
    timing = step.timing
    speed = (speedup_text(timing) if timing is not None else "") or "not timed"
    verified = "verified" if step.verdict is not None and step.verdict.is_correct else "not verified"
    return f"{speed} · {verified}"
