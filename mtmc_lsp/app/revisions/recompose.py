"""Takes one step out of a stored run at once: the later steps are written again from the stored graph.

Nothing runs and nothing is captured, so this takes milliseconds. The steps that are written again have no verdict. Resuming the
new run verifies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.app.run_recorder import RunConfig
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.protocols import CannotCode, Coder
from mtmc_lsp.core.run import Author, Candidate, Final, Placement, RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search.outcome import speedup_of
from mtmc_lsp.search.store import RunRecord, Store
from mtmc_lsp.source.compose import strip_generated, unified_diff

DISCARDED = "you discarded it"
UNDONE = "you undid it"
REWRITTEN = "written again after a step before it was removed"


@dataclass(frozen=True)
class Recomposed:
    """A run without one of its steps."""

    run: str
    """The id of the new run, which replaces the earlier one."""
    is_verified: bool
    """Whether every step in it has a verdict. Otherwise the run is unfinished, and resuming it verifies them."""


def open_coder(config: RunConfig) -> Coder:
    """The coder that wrote the steps of a run without a model."""
    return BuiltinCoder(config.device, Placement(config.settings.place))


def without_step(store: Store, run: str, index: int, reason: str) -> Recomposed | None:
    """Store a run without its accepted step ``index``.

    Args:
        reason: why the step was removed, as a clause.

    Returns:
        The new run; None if later steps cannot be written here: a model wrote one of them, they are in several regions, or
        an earlier version stored the run without its graph.

    Raises:
        RequestError: the run does not exist, is unfinished, or has no such accepted step.
    """
    record = next((item for item in store.runs() if item.id == run), None)
    result, steps = store.result(run), store.steps(run)
    if record is None or (result is None and not any(_is_unverified(step) for step in steps)):
        raise RequestError(f"run {run} is not finished", remedy="Wait until it is finished, or resume it first.")
    steps = list(result.steps) if result is not None else steps
    removed = next((s for s in steps if s.index == index and s.status is StepStatus.ACCEPTED), None)
    if removed is None:
        raise RequestError(f"run {run} has no step {index} that was accepted", remedy="Run it again.")
    before = [step for step in steps if step.index < index]
    later = [step for step in steps if step.index > index and step.status is StepStatus.ACCEPTED]
    config = store.config(run, RunConfig)
    head = [*before, replace(removed, status=StepStatus.REJECTED, reason=reason)]
    if not later:
        head += [step for step in steps if step.index > index]
        written = list[Step]()
    else:
        source = _plain(record, removed)
        rewritten = _rewritten(config, source, before, later, name=record.path.rpartition("/")[2])
        if rewritten is None:
            return None
        written = rewritten
    new = store.begin(record.path, record.qualname, record.source_hash, record.environment)
    base = result or (store.result(config.based_on) if config is not None and config.based_on else None)
    if config is not None:
        store.add_config(new, replace(config, based_on=base.id if base is not None else ""))
    for step in (*head, *written):
        store.add_step(new, step)
    is_verified = not any(_is_unverified(step) for step in (*head, *written))
    if is_verified and base is not None:
        store.finish(_finished(base, new, record, (*head, *written)))
    return Recomposed(new, is_verified)


def _is_unverified(step: Step) -> bool:
    return step.status is StepStatus.ACCEPTED and step.verdict is None


def first_unverified(steps: Sequence[Step]) -> int:
    """How many steps precede the first accepted one without a verdict; all if there is none."""
    return next((number for number, step in enumerate(steps) if _is_unverified(step)), len(steps))


def _plain(record: RunRecord, step: Step) -> str:
    """The user's file without the target's code."""
    assert step.candidate is not None
    return strip_generated(step.candidate.source.encode(), record.qualname).decode()


def _rewritten(
    config: RunConfig | None, source: str, before: Sequence[Step], later: Sequence[Step], name: str
) -> list[Step] | None:
    """The accepted steps ``later`` on the last version of ``before``, numbered from the removed step on; None if not possible."""
    accepted = [step for step in before if step.status is StepStatus.ACCEPTED]
    candidates = [step.candidate for step in (*accepted, *later) if step.candidate is not None]
    if config is None or len(config.captures) != 1 or any(item.author is Author.MODEL for item in candidates):
        return None
    capture, coder = config.captures[0], open_coder(config)
    base = next((step.candidate for step in reversed(accepted) if step.candidate), None)
    base = base or coder.start(capture, source)
    steps: list[Step] = []
    for step in later:
        number = len(before) + 2 + len(steps)
        steps.append(_on(base, coder, capture, replace(step, index=number), name))
        base = steps[-1].candidate or base
    return steps


def _on(base: Candidate, coder: Coder, capture: Capture, step: Step, name: str) -> Step:
    """A step on another version; without a candidate if it cannot be written there."""
    # The candidate's action holds the configuration that was chosen for it.
    action = (step.candidate.action if step.candidate is not None else None) or step.action
    bare = Step(step.index, action, StepStatus.FAILED, "", region=step.region, base=base.id, prior=step.prior)
    try:
        candidate = coder.write(capture, base, action)
    except CannotCode as reason:
        return replace(bare, reason=f"it cannot be written without the removed step: {reason}")
    if candidate.source == base.source:
        return replace(bare, status=StepStatus.REJECTED, reason="it changes nothing without the removed step")
    candidate = replace(candidate, dependencies=capture.graph.dependencies)
    diff = unified_diff(base.source, candidate.source, name)
    return replace(bare, status=StepStatus.ACCEPTED, reason=REWRITTEN, candidate=candidate, diff=diff)


def _finished(result: RunResult, run: str, record: RunRecord, steps: Sequence[Step]) -> RunResult:
    """The result of a run whose remaining steps were verified and timed in an earlier run."""
    accepted = [step for step in steps if step.status is StepStatus.ACCEPTED and step.candidate is not None]
    root = strip_generated(result.final.source.encode(), record.qualname).decode()
    # The last remaining step may be a base to tune that is slower than the user's code.
    last = accepted[-1] if accepted and not accepted[-1].is_base else None
    source = last.candidate.source if last is not None and last.candidate is not None else root
    timing = accepted[-1].timing if accepted else None
    speedup = speedup_of(timing) if timing is not None else None
    roofline = timing.roofline if timing is not None else None
    final = Final(source, unified_diff(root, source, record.path.rpartition("/")[2]), speedup, roofline)
    status = result.status if last is not None else RunStatus.NO_GAIN
    return replace(result, id=run, steps=tuple(steps), final=final, status=status)
