"""The words that every client shows for a step: its title, its outcome, and one line of numbers."""

from __future__ import annotations

from mtmc_lsp.core.action import capitalized
from mtmc_lsp.core.results import OBSERVED, Verdict, VerdictStatus
from mtmc_lsp.core.run import Step
from mtmc_lsp.report.phrases import checks_text, memory_text, microseconds
from mtmc_lsp.server.reviews import ReviewState


def step_title(step: Step) -> str:
    """``Fuse linear and gelu into one kernel``."""
    return capitalized(step.action.text or step.action.kind.value)


def position(review_state: ReviewState, step: Step) -> str:
    """``2/4``: the number of a step among the accepted ones."""
    accepted = review_state.review.accepted
    return f"{accepted.index(step) + 1}/{len(accepted)}"


def outcome(step: Step) -> str:
    """``1.25x · verified``."""
    eager = step.timing.against("eager") if step.timing is not None else None
    # A step without a verdict was written again after another one was removed.
    speed = f"{ratio(eager.ratio)} · " if eager is not None else "" if step.verdict is None else "not timed · "
    return f"{speed}{verified(step.verdict)}"


def verified(verdict: Verdict | None) -> str:
    """Whether a step is verified, in words."""
    if verdict is None:
        return "not verified yet"
    if not verdict.is_correct:
        return "not verified"
    if verdict.status is VerdictStatus.CORRECT_AT_REDUCED_SIZES:
        return "verified at smaller sizes"
    return "verified"


def ratio(value: float) -> str:
    """``1.25x``, ``12x``."""
    return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"


def numbers(step: Step) -> str:
    """What was measured: ``1.90x faster · 410 us -> 216 us · exact to 3e-07 (yours 3e-07) · 3.10x of torch.compile ·
    0 bytes more memory · all 193 checks passed``."""
    parts: list[str] = []
    timing = step.timing
    eager = timing.baseline("eager") if timing is not None else None
    if timing is not None and eager is not None and eager.speedup is not None:
        is_faster = eager.speedup.ratio >= 1.0
        word = f"{ratio(eager.speedup.ratio)} faster" if is_faster else f"{ratio(1 / eager.speedup.ratio)} slower"
        parts += [word, f"{microseconds(eager.median_us)} -> {microseconds(timing.median_us)}"]
    elif step.verdict is not None:
        parts.append("not timed: no GPU")
    parts += _exactness(step.verdict)
    compiled = timing.against("compile") if timing is not None else None
    if compiled is not None:
        parts.append(f"{ratio(compiled.ratio)} of torch.compile")
    more_bytes = timing.more_bytes("eager") if timing is not None else None
    if more_bytes is not None:
        parts.append(memory_text(more_bytes))
    parts += _checks(step.verdict)
    return " · ".join(parts)


def _exactness(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return ["being verified"]
    if not verdict.is_correct:
        return [verdict.reason]
    if verdict.mode == OBSERVED:
        return []
    return [f"exact to {verdict.error:.0e} (yours {verdict.reference_error:.0e})"]


def _checks(verdict: Verdict | None) -> list[str]:
    """How many checks passed, and where. Checks that need a GPU are no failures, so they are named apart."""
    if verdict is None or not verdict.checks:
        return []
    where = "on the GPU" if verdict.mode == "gpu" else "in Triton's interpreter"
    return [f"{checks_text(verdict.checks)} {where}"]
