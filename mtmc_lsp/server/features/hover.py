"""Hover: run results of a target and its kernels, when they run, and short explanations of Triton functions."""

from __future__ import annotations

import datetime
import re

from lsprotocol import types as lsp

from mtmc_lsp.core.results import CheckStatus
from mtmc_lsp.core.run import Author, Step
from mtmc_lsp.core.workload import TargetKind, Workload
from mtmc_lsp.docs import page
from mtmc_lsp.guard.conditions import conditions_in
from mtmc_lsp.kernels.reading import OperationKind, read_kernels
from mtmc_lsp.report.phrases import headline, microseconds, model_line, peak_text, ratio_text, verdict_line
from mtmc_lsp.server.features.steps.wording import position, step_title, verified
from mtmc_lsp.server.kernels_file.texts import whole_text
from mtmc_lsp.server.reviews import Review, ReviewState
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.blocks import block_code
from mtmc_lsp.source.dispatch.marks import DISPATCH
from mtmc_lsp.source.triton.glossary import ACTIONS, TRITON
from mtmc_lsp.verify.delivery import GUARD_ACCEPTS

RUN_WHEN = "**The kernels run** on tensors of the current GPU{}, if"
MAX_CONDITIONS = 8
WORD = re.compile(rb"[A-Za-z_][\w.]*")
MAX_TENSORS = 4
ACCESSES = (OperationKind.LOAD, OperationKind.STORE, OperationKind.ATOMIC)
WORK = ((OperationKind.LOOP, "loops"), (OperationKind.PRODUCT, "products"), (OperationKind.REDUCTION, "reductions"))
MAX_ACCESSES = 12


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
    parts = [
        run_table(review_state) if review_state is not None else "",
        guard_text(ls, document, qualname),
        kernel_text(document, qualname),
    ]
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
    without = [] if b"(torch.autograd.Function)" in whole else ["gradients"]
    without += [] if b'torch.get_autocast_dtype("cuda") == torch.' in whole else ["autocast"]
    state = f", without {' and '.join(without)}" if without else ""
    parts = [RUN_WHEN.format(state), "\n".join(["```python", *shown, "```"])]
    text, verdict = ls.verdicts.get((document.path, qualname), (b"", None))
    checks = verdict.checks if verdict is not None and text == whole else ()
    refused = next(
        (check for check in checks if check.name == GUARD_ACCEPTS and check.status is CheckStatus.FAILED), None
    )
    if refused is not None:
        parts.append(f"**They do not run for the file's workload:** {refused.detail}")
    return "\n\n".join(parts)


# Kernels -------------------------------------------------------------------------------------------------------------


def kernel_text(document: Document, qualname: str) -> str:
    """What a kernel of the file reads, writes and computes, by its text; empty for other targets."""
    outlined = document.outline.find(qualname)
    if outlined is None or outlined.target.kind is not TargetKind.KERNEL:
        return ""
    reading = next(iter(read_kernels(document.path, document.text.data, (qualname.rpartition(".")[2],))), None)
    if reading is None:
        return ""
    rows = ["| line | | tensor | mask | offset |", "|---|---|---|---|---|"]
    accesses = [item for item in reading.operations if item.kind in ACCESSES]
    for item in accesses[:MAX_ACCESSES]:
        mask = "yes" if item.mask else "no"
        offset = f"`{_cell(item.index)}`" if item.index else ""
        rows.append(f"| {item.line} | {item.kind.value} | {item.tensor} | {mask} | {offset} |")
    counts = [
        f"{name}: {sum(item.kind is kind for item in reading.operations)}"
        for kind, name in WORK
        if any(item.kind is kind for item in reading.operations)
    ]
    left = len(accesses) - MAX_ACCESSES
    more = [f"and {left} more accesses"] if left > 0 else []
    profile = f"`mtmc profile {document.path.rpartition('/')[2]}::{qualname}` shows bytes and access patterns."
    return "\n\n".join(["\n".join(rows), ", ".join([*counts, *more]), profile])


# The table -----------------------------------------------------------------------------------------------------------


def run_table(review_state: ReviewState) -> str:
    """A run as a small Markdown table: the last kept step, else the pending step that is shown."""
    review, kept = review_state.review, review_state.kept_steps[-1:]
    step = kept[0] if kept else review_state.selected
    parts = [f"**{review.qualname}** · {_state(review_state)}"]
    if review_state.is_changed:
        parts.append("_The function changed since this run; all results refer to the old code._")
    elif review_state.is_stale:
        parts.append(f"_{review_state.stale_description}; all results refer to the old state._")
    if step is None:
        parts += [headline(review.result)] if review.result is not None else []
    else:
        rows = [
            ("step", f"{position(review_state, step)} {_cell(step_title(step))}"),
            *_rows(review, step),
        ]
        parts.append("\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]))
        author = " Written by a language model." if step.candidate and step.candidate.author is Author.MODEL else ""
        parts.append(f"{_action_link(step.action.kind.value)}: {step.action.rationale}{author}")
    if review.result is not None and review.result.model_use is not None:
        parts.append(f"_{model_line(review.result.model_use)}_")
    return "\n\n".join(part for part in parts if part)


def _state(review_state: ReviewState) -> str:
    """``1 kept, 2 pending, 3 rejected``."""
    rejected = len(review_state.review.steps) - len(review_state.review.accepted)
    counts = [(review_state.kept_count, "kept"), (len(review_state.pending), "pending"), (rejected, "rejected")]
    return ", ".join(f"{count} {word}" for count, word in counts if count) or "no steps"


def _rows(review: Review, step: Step) -> list[tuple[str, str]]:
    timing, rows = step.timing, list[tuple[str, str]]()
    if timing is not None:
        ratios = [(b.name, b.speedup) for b in timing.baselines if b.name != "previous" and b.speedup is not None]
        rows.append(("time", microseconds(timing.median_us)))
        rows += [("speedup", ", ".join(f"{ratio_text(value)} over {name}" for name, value in ratios))] if ratios else []
        rows.append(("roofline", f"{timing.roofline:.0%}"))
        rows += [("peak memory", peak)] if (peak := peak_text(timing)) else []
    else:
        rows.append(("time", "not timed: no GPU" if step.verdict is not None else "being measured"))
    expected = step.action.expected
    if expected.bytes_before and expected.bytes_after:
        before, after = expected.bytes_before / 1e6, expected.bytes_after / 1e6
        rows.append(("memory traffic", f"{before:.3g} MB -> {after:.3g} MB (estimated)"))
    rows.append(("correctness", verdict_line(step.verdict) if step.verdict is not None else verified(None)))
    if review.result is not None and (shapes := _shapes(review.result.workload)):
        rows.append(("inputs", shapes))
    rows.append(("measured", _where(review)))
    return [(name, _cell(text)) for name, text in rows]


def _shapes(workload: Workload) -> str:
    """``x f32[8,48]``: the tensors that were used, with their sizes."""
    texts = []
    for name, tensor in list(workload.tensors.items())[:MAX_TENSORS]:
        sizes = ",".join(str(size.value(workload.sizes)) for size in tensor.shape)
        texts.append(f"{name} {tensor.dtype}[{sizes}]")
    more = len(workload.tensors) - len(texts)
    return ", ".join([*texts, *([f"and {more} more"] if more > 0 else [])])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _where(review: Review) -> str:
    when = datetime.datetime.fromtimestamp(review.started).strftime("%Y-%m-%d %H:%M")
    env = review.environment
    if env is None:
        return when
    return f"{when}, {env.gpu or 'no CUDA GPU'}, torch {env.torch}, triton {env.triton}"
