"""From a version of the lineage to a run: its actions are written again as steps, and the whole verification decides on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mtmc_lsp.app.pipeline import Pipeline, RunOptions
from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.protocols import CannotCode, Coder
from mtmc_lsp.core.run import Author, Candidate, Placement, RunResult, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve.evolution import key_of
from mtmc_lsp.evolve.lineage import Event, EventKind, Generation, Lineage, Version
from mtmc_lsp.evolve.stored import StoredEvolution, resumable
from mtmc_lsp.llm.open_regions import FREE_EDIT
from mtmc_lsp.search.components import Events
from mtmc_lsp.source.compose import unified_diff

SECONDS_PER_STEP = 60.0
"""Time for the whole verification and the timing of one step, beside a run's usual budget."""


def steps_of(lineage: Lineage, number: int, capture: Capture, coder: Coder) -> list[Step]:
    """The steps that lead from the user's code to a version, without a verdict.

    Actions that the result does not need are left out, if the built-in coder wrote all versions.

    Raises:
        RequestError: the version was not written.
    """
    path, root = lineage.path(number), lineage.version(0).candidate
    assert root is not None
    final = lineage.version(number)
    if final.candidate is None:
        raise RequestError(f"version {number} was not written: {final.reason}", remedy="Choose another version.")
    if any(item.candidate is not None and item.candidate.author is Author.MODEL for item in path):
        return _numbered(_replayed(path, root, capture, coder))
    actions = [action for item in path for action in item.actions]
    return _numbered(_written(_needed(actions, key_of(final.candidate), root, capture, coder), root, capture, coder))


def _needed(
    actions: Sequence[MacroAction], key: str, root: Candidate, capture: Capture, coder: Coder
) -> list[MacroAction]:
    """The actions without those that the result does not need."""
    needed = list(actions)
    for action in list(actions):
        others = [item for item in needed if item is not action]
        try:
            candidate = root
            for other in others:
                candidate = coder.write(capture, candidate, other)
        except CannotCode:
            continue
        if key_of(candidate) == key:
            needed = others
    return needed


def _written(actions: Sequence[MacroAction], root: Candidate, capture: Capture, coder: Coder) -> list[Step]:
    steps, before = list[Step](), root
    for action in actions:
        after = coder.write(capture, before, action)
        steps.append(_step(action, before, after, capture))
        before = after
    return steps


def _replayed(path: Sequence[Version], root: Candidate, capture: Capture, coder: Coder) -> list[Step]:
    """The steps of a path with edits of a model. All edits of a version are one step: only the text after them is stored."""
    steps, before = list[Step](), root
    for version in path:
        assert version.candidate is not None
        edits = [action for action in version.actions if FREE_EDIT in action.params]
        builtin = [action for action in version.actions if FREE_EDIT not in action.params]
        written = (
            _written(builtin, before, capture, coder) if version.candidate.author is Author.BUILTIN or edits else []
        )
        steps += written
        before = written[-1].candidate or before if written else before
        if edits or not written:
            # Without edits, a model wrote the version as a step of the run that the evolution started from.
            action = replace((edits or builtin)[-1], text="; then ".join(item.text for item in edits or builtin))
            steps.append(_step(action, before, version.candidate, capture))
            before = version.candidate
    return steps


def _step(action: MacroAction, before: Candidate, after: Candidate, capture: Capture) -> Step:
    name = capture.workload.target.path.rpartition("/")[2]
    candidate = replace(after, dependencies=capture.graph.dependencies)
    diff = unified_diff(before.source, after.source, name)
    return Step(0, action, StepStatus.ACCEPTED, "an action of an evolution", diff, candidate, base=before.id)


def _numbered(steps: Sequence[Step]) -> list[Step]:
    titles: set[str] = set()
    result = []
    for number, step in enumerate(steps, 1):
        text, attempt = step.action.text, 2
        while text in titles:
            text, attempt = f"{step.action.text}, attempt {attempt}", attempt + 1
        titles.add(text)
        result.append(replace(step, index=number, action=replace(step.action, text=text)))
    return result


def keep_best(
    lineage: Lineage,
    keep: Callable[[Version], RunResult],
    store: Callable[[Generation, Sequence[Version]], None],
) -> tuple[Lineage, RunResult]:
    """Verify the best version as a whole; if that refuses it, the next best one, and so on.

    Args:
        keep: verifies a version, and stores its steps and the result as those of the run.
        store: stores a generation.
    """
    while True:
        best = lineage.best()
        result = keep(best)
        failed = next((step for step in result.steps if step.status is StepStatus.FAILED), None)
        if failed is None or best.number == 0:
            return lineage, result
        text = f"the whole verification refused version {best.number}: {failed.reason}"
        last = lineage.generations[-1]
        event = Event(EventKind.REFUSED, text, best.island, best.number)
        generation = replace(last, events=(*last.events, event))
        store(generation, ())
        lineage = lineage.with_generation(generation, ())


def seconds_for(steps: Sequence[Step], budget: float) -> float:
    """The time that the whole verification of some steps may take."""
    return max(budget, SECONDS_PER_STEP * len(steps))


def no_such_version(number: int, lineage: Lineage, run: str, path: str) -> RequestError:
    """The error for a number that no version has."""
    return RequestError(
        f"run {run} has no version {number}",
        where=Location(path),
        remedy=f"Choose one from 0 to {len(lineage.versions) - 1}; see `mtmc lineage {run}`.",
    )


def keep_version(
    stored: StoredEvolution,
    number: int,
    target: OpenTarget,
    events: Events,
    open_pipeline: Callable[[OpenTarget, RunOptions, Events], Pipeline] = Pipeline,
) -> RunResult:
    """Any version of a lineage as a new run: each of its steps is written again and verified as a whole.

    Args:
        open_pipeline: makes the pipelines for it, one after the other.

    Raises:
        MtmcError: the target cannot be captured.
        FileChanged: the file changed since the evolution began.
        RequestError: the version was not written, or the machine is another one.
    """
    with open_pipeline(target, RunOptions(), events) as first:
        capture, device = first.capture(), first.device()
        resumable(first.store(), stored.record, target, capture)
    coder = BuiltinCoder(device, Placement(target.settings.place))
    steps = steps_of(stored.lineage, number, capture, coder)
    budget = seconds_for(steps, target.settings.budget_seconds)
    request = replace(target.request, settings=replace(target.settings, budget_seconds=budget))
    with open_pipeline(replace(target, request=request), RunOptions(), events) as pipeline:
        return pipeline.keep(steps)
