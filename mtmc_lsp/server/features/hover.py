"""Hover: run results of a target and its kernels, when they run, and short explanations of Triton functions."""

from __future__ import annotations

import datetime
import re

from lsprotocol import types as lsp

from mtmc_lsp.core.results import BaselineTime, CheckStatus, Timing
from mtmc_lsp.core.run import Author, Step, StepStatus
from mtmc_lsp.docs import page
from mtmc_lsp.guard.conditions import conditions_in
from mtmc_lsp.report.phrases import headline, model_line, ratio_text, report_lines, timing_notes, verdict_line
from mtmc_lsp.server.kernels_file.texts import whole_text
from mtmc_lsp.server.reviews import Review, ReviewState
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.blocks import block_code
from mtmc_lsp.source.dispatch.marks import DISPATCH
from mtmc_lsp.source.triton.glossary import ACTIONS, TRITON
from mtmc_lsp.verify.delivery import GUARD_ACCEPTS

RUN_WHEN = "**The kernels run** on tensors of the current GPU, without gradients and autocast, if"
MAX_CONDITIONS = 8
WORD = re.compile(rb"[A-Za-z_][\w.]*")
MARKS = {StepStatus.ACCEPTED: "✓", StepStatus.REJECTED: "-", StepStatus.FAILED: "✗"}


def register(server: Server) -> None:
    """Register hover."""
    server.feature(lsp.TEXT_DOCUMENT_HOVER)(hover)


def hover(ls: Server, params: lsp.HoverParams) -> lsp.Hover | None:
    """The hover text at a position."""
    document = ls.document(params.text_document.uri)
    if document is None:
        return None
    line, text = params.position.line, document.text
    word, start, end = _word(document, params.position)
    explanation = _explanation(document, line, word)
    if explanation is not None:
        return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, explanation), text.range(start, end))
    qualname = _target_at_line(document, line)
    if qualname is None:
        return None
    review_state = ls.review_state(document, qualname)
    parts = [run_table(review_state) if review_state is not None else "", guard_text(ls, document, qualname)]
    shown = "\n\n".join(part for part in parts if part)
    return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, shown), text.line_range(line)) if shown else None


def _word(document: Document, position: lsp.Position) -> tuple[str, int, int]:
    """The dotted name at a position, and its start and end offset."""
    offset = document.text.offset(position)
    data = document.text.data
    line_start = offset - len(data[data.rfind(b"\n", 0, offset) + 1 : offset])
    for match in WORD.finditer(document.text.line(position.line)):
        if line_start + match.start() <= offset <= line_start + match.end():
            return match[0].decode("utf-8", "replace"), line_start + match.start(), line_start + match.end()
    return "", offset, offset


def _explanation(document: Document, line: int, word: str) -> str | None:
    qualifier, _, name = word.rpartition(".")
    imports = document.outline.names.imports
    module = imports.get(qualifier.split(".")[0], "") + qualifier[len(qualifier.split(".")[0]) :]
    is_language = module in ("triton.language", "triton.language.math")
    if name in TRITON and (is_language or (word == "triton.cdiv" and module == "triton")):
        return f"**`{word}`** (Triton)\n\n{TRITON[name]}"
    comment = document.text.line(line).decode("utf-8", "replace").partition("#")[2]
    if word in ACTIONS and word in comment and document.block_at(line) is not None:
        return f"**{_action_link(word)}** (macro action)\n\n{ACTIONS[word]}"
    return None


def _action_link(kind: str) -> str:
    """An action's name, as a link to its page."""
    return f"[{kind}]({page('actions', kind).as_uri()})"


def _target_at_line(document: Document, line: int) -> str | None:
    """The target of a line: a line of its ``def`` statement or decorators, its dispatch line, or its generated block."""
    block = document.block_at(line)
    if block is not None:
        return block
    outlined = document.outline.target_at(line)
    if outlined is None:
        return None
    is_header = outlined.first_line - 1 <= line <= outlined.target.start_line - 1
    return outlined.target.qualname if is_header or DISPATCH.encode() in document.text.line(line) else None


# The guard -----------------------------------------------------------------------------------------------------------


def guard_text(ls: Server, document: Document, qualname: str) -> str:
    """When the kernels in the file run, and why they do not run for its workload if the last verification noticed it."""
    whole = whole_text(ls, document, qualname)
    block = block_code(whole, qualname)
    conditions = conditions_in(block) if block is not None else ()
    if not conditions:
        return ""
    # Conditions on arguments come first: the caller can change those.
    ordered = sorted(conditions, key=lambda text: "self." in text)
    more = len(ordered) - MAX_CONDITIONS
    shown = [*ordered[:MAX_CONDITIONS], *([f"... # and {more} more"] if more > 0 else [])]
    parts = [RUN_WHEN, "\n".join(["```python", *shown, "```"])]
    text, verdict = ls.verdicts.get((document.path, qualname), (b"", None))
    checks = verdict.checks if verdict is not None and text == whole else ()
    refused = next(
        (check for check in checks if check.name == GUARD_ACCEPTS and check.status is CheckStatus.FAILED), None
    )
    if refused is not None:
        parts.append(f"**They do not run for the file's workload:** {refused.detail}")
    return "\n\n".join(parts)


# The table -----------------------------------------------------------------------------------------------------------


def run_table(review_state: ReviewState) -> str:
    """A run as Markdown."""
    review = review_state.review
    parts = [f"**{review.qualname}** · run `{review.run}`"]
    if review.result is not None:
        parts.append(headline(review.result))
    if review_state.is_changed:
        parts.append("_The function changed since this run; all results refer to the old code._")
    elif review_state.is_stale:
        parts.append(f"_{review_state.stale_description}; all results refer to the old state._")
    parts.append(_steps(review_state))
    shown = review_state.shown
    if shown is not None:
        parts += _details(shown)
    if review.result is not None and review.result.model_use is not None:
        parts.append(f"_{model_line(review.result.model_use)}_")
    parts.append(_where(review))
    return "\n\n".join(part for part in parts if part)


def _steps(review_state: ReviewState) -> str:
    steps = review_state.review.steps
    names = list(dict.fromkeys(b.name for s in steps if s.timing for b in s.timing.baselines if b.name != "previous"))
    rows = [["", "step", "time", *(f"over {name}" for name in names)], ["---"] * (3 + len(names))]
    for step in steps:
        kept_label = " (kept)" if step in review_state.kept_steps else ""
        timing = step.timing
        time = f"{timing.median_us:.1f} us" if timing is not None else "not timed"
        title = f"{step.index}. {_cell(step.action.text)}{kept_label}"
        if step.status is not StepStatus.ACCEPTED:
            title += f": {_cell(step.reason)}"
        over = [ratio_text(timing.against(name)) if timing is not None else "-" for name in names]
        rows.append([MARKS[step.status], title, time, *over])
    for baseline in _baselines(steps):
        rows.append(["", f"_{baseline.name}_", f"{baseline.median_us:.1f} us", *([""] * len(names))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _baselines(steps: tuple[Step, ...]) -> list[BaselineTime]:
    """The most recent times of the baselines."""
    timing = next((step.timing for step in reversed(steps) if step.timing is not None), None)
    return [b for b in timing.baselines if b.name != "previous" and b.speedup] if timing is not None else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _details(step: Step) -> list[str]:
    author = " Written by a language model." if step.candidate and step.candidate.author is Author.MODEL else ""
    parts = [f"**Step {step.index}: {_action_link(step.action.kind.value)}.** {step.action.rationale}{author}"]
    lines = []
    if step.timing is not None:
        lines += [_timing(step.timing), *timing_notes(step.timing)]
    if step.report is not None:
        lines += report_lines(step.report)
    if step.verdict is not None:
        lines.append(verdict_line(step.verdict))
        lines += step.verdict.notes
    parts.append("\n".join(f"- {line}" for line in lines))
    return parts


def _timing(timing: Timing) -> str:
    return (
        f"{timing.median_us:.1f} us, {timing.roofline:.0%} of the roofline, {timing.samples} samples; {timing.method}"
    )


def _where(review: Review) -> str:
    when = datetime.datetime.fromtimestamp(review.started).strftime("%Y-%m-%d %H:%M")
    env = review.environment
    if env is None:
        return f"_{when}_"
    machine = env.gpu or "no CUDA GPU"
    return f"_{when}, {machine}, torch {env.torch}, triton {env.triton}, Python {env.python}_"
