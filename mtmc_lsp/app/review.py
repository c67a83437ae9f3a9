"""What a user decides about steps after they were found: undo one and keep the others, or ask for another.

Neither is done on the text. A step is undone by writing the actions behind it again, on the version before it, and
verifying each of them anew; the outcome is a run of its own, which takes the place of the one it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mtmc_lsp.app.pipeline import OpenTarget, Replay, open_tools
from mtmc_lsp.app.search_components import Revision, RunRecorder, SearchComponents
from mtmc_lsp.core.action import REMARK, MacroAction
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.protocols import Planner, Repairer, State
from mtmc_lsp.core.results import CompileReport, Timing
from mtmc_lsp.core.run import Final, RunResult, RunStatus, Speedup, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search.greedy import Events, GreedySearch
from mtmc_lsp.search.store import Store
from mtmc_lsp.source.compose import strip_generated, unified_diff

UNDONE = "you undid it"
ANOTHER = "you asked for another"


def rejected(steps: Sequence[Step], index: int, reason: str) -> list[Step]:
    """The steps up to the one numbered ``index``, which the user does not want.

    It stays in the history as rejected, so no planner proposes it again.
    """
    before = [step for step in steps if step.index < index]
    return [*before, *(replace(s, status=StepStatus.REJECTED, reason=reason) for s in steps if s.index == index)]


def revised(
    opened: OpenTarget, capture: Capture, store: Store, events: Events, revision: Revision, tools: SearchComponents
) -> RunResult:
    """A run of its own that is another one without a step, or with something else in its place.

    Raises:
        RequestError: the other run has no such step.
    """
    steps, index = store.steps(revision.run), revision.step
    if not any(step.index == index for step in steps):
        raise RequestError(f"run {revision.run} has no step {index}", remedy="Run it again.")
    if tools.setup is not None:
        tools = replace(tools, setup=replace(tools.setup, revision=revision))
    if revision.kind == "undo":
        return without(opened, capture, store, events, steps, index, tools)
    return another(opened, capture, store, events, steps, index, tools, revision.remark)


def replayed_revision(replay: Replay, capture: Capture, store: Store, events: Events) -> RunResult:
    """A stored run that came of another one, done again with the answers that a model gave then."""
    assert replay.revision is not None, "others are searched for from their beginning"
    steps = store.steps(replay.revision.run)
    tools = open_tools(replay.opened, capture, replay.makers, model=replay.model, steps=steps)
    try:
        return revised(replay.opened, capture, store, events, replay.revision, tools)
    finally:
        tools.measurer.close()


def without(
    opened: OpenTarget,
    capture: Capture,
    store: Store,
    events: Events,
    steps: Sequence[Step],
    index: int,
    tools: SearchComponents,
) -> RunResult:
    """The accepted steps without the one numbered ``index``: those behind it are written and verified again."""
    later = [step.action for step in steps if step.index > index and step.status is StepStatus.ACCEPTED]
    planner: Planner = _InTurn(later)
    limits = replace(tools.limits, steps=index + len(later))

    def search(told: Events) -> GreedySearch:
        parts = (capture, opened.plain.decode(), planner, tools.coder, tools.measurer)
        return _Rederivation(*parts, has_gpu=tools.has_gpu, limits=limits, events=told)

    return _stored(search, opened, capture, store, events, rejected(steps, index, UNDONE), tools)


def without_last(store: Store, run: str, index: int) -> str:
    """The run without its last accepted step: nothing has to be written or verified again. Gives the new run's id.

    Raises:
        RequestError: the run is not there, or not over.
    """
    result = store.result(run)
    if result is None:
        raise RequestError(f"run {run} is not over", remedy="Wait for its end, or go on with it first.")
    steps = tuple(
        replace(s, status=StepStatus.REJECTED, reason=UNDONE) if s.index == index else s for s in result.steps
    )
    left = [step for step in steps if step.status is StepStatus.ACCEPTED and step.candidate is not None]
    record = next(item for item in store.runs() if item.id == run)
    new = store.begin(record.path, record.qualname, record.source_hash, record.environment)
    for step in steps:
        store.add_step(new, step)
    root = strip_generated(result.final.source.encode(), record.qualname).decode()
    # What is left may be a base to tune that is slower than the user's own code.
    last = left[-1] if left and not left[-1].is_base else None
    source = last.candidate.source if last is not None and last.candidate is not None else root
    timing = left[-1].timing if left else None
    speedup = None
    if timing is not None:
        speedup = Speedup(timing.against("eager"), timing.against("compile"), timing.against(timing.best))
    roofline = timing.roofline if timing is not None else None
    final = Final(source, unified_diff(root, source, record.path.rpartition("/")[2]), speedup, roofline)
    status = result.status if last is not None else RunStatus.NO_GAIN
    store.finish(replace(result, id=new, steps=steps, final=final, status=status))
    return new


def another(
    opened: OpenTarget,
    capture: Capture,
    store: Store,
    events: Events,
    steps: Sequence[Step],
    index: int,
    tools: SearchComponents,
    remark: str = "",
) -> RunResult:
    """The run as if the step numbered ``index`` had been rejected: the search goes on from the version before it.

    Where a model takes part, ``remark`` says what the user wants of it, and the same action is tried first: the remark is as
    often about how it was written as about what was done.
    """
    planner = tools.planner
    if remark and isinstance(tools.coder, Repairer):
        action = next(step.action for step in steps if step.index == index)
        again = replace(action, params={**action.params, REMARK: remark}, text=f"{action.text}, and {remark}")
        planner = _InTurn([again], then=tools.planner)
    limits = replace(tools.limits, steps=index + tools.limits.steps)

    def search(told: Events) -> GreedySearch:
        parts = (capture, opened.plain.decode(), planner, tools.coder, tools.measurer)
        return GreedySearch(*parts, has_gpu=tools.has_gpu, limits=limits, events=told)

    reason = f"{ANOTHER}: {remark}" if remark else ANOTHER
    return _stored(search, opened, capture, store, events, rejected(steps, index, reason), tools)


def _stored(
    make: Callable[[Events], GreedySearch],
    opened: OpenTarget,
    capture: Capture,
    store: Store,
    events: Events,
    done: Sequence[Step],
    tools: SearchComponents,
) -> RunResult:
    path, qualname = str(opened.request.path), opened.target.qualname
    run_id = store.begin(path, qualname, opened.source_hash, capture.environment)
    keeper = RunRecorder(store, run_id, tools)
    search = make(keeper.events(events, also_replayed=True))
    return keeper.finish(search.run(run_id, opened.source_hash, done))


class _InTurn:
    """Proposes the given actions, each once, and then whatever another planner proposes."""

    def __init__(self, actions: Sequence[MacroAction], then: Planner | None = None) -> None:
        self._left = list(actions)
        self._then = then

    def propose(self, state: State) -> MacroAction | None:
        if self._left:
            return self._left.pop(0)
        return self._then.propose(state) if self._then is not None else None


class _Rederivation(GreedySearch):
    """Keeps every step that is still correct: the user decided for these steps, and only one of them is taken out."""

    @staticmethod
    def _judge_unmeasured(step: Step, report: CompileReport) -> Step:
        archs = ", ".join(dict.fromkeys(kernel.arch for kernel in report.kernels))
        reason = f"written and verified again by Triton's interpreter, compiled for {archs}; not timed: no GPU"
        return replace(step, status=StepStatus.ACCEPTED, reason=reason)

    @staticmethod
    def _judge_timed(step: Step, timing: Timing, *, whole: bool = False) -> Step:
        judged = GreedySearch._judge_timed(step, timing, whole=whole)
        return replace(judged, status=StepStatus.ACCEPTED, reason=f"written and verified again: {judged.reason}")
