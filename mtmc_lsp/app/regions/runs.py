"""A run of several regions: one search after the other, as one sequence of steps with one result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mtmc_lsp.capture.regions.search import Regions
from mtmc_lsp.codegen.coder import BuiltinCoder, content_id
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.protocols import Coder, State
from mtmc_lsp.core.results import Ratio, Verdict
from mtmc_lsp.core.run import KEPT, Candidate, GeneratedCode, RunResult, RunStatus, Speedup, Step, StepStatus
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture, CodeRegion, Target
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.search.components import Events
from mtmc_lsp.source.compose import compose, strip_generated, unified_diff

LEAST_SAVED_US = 2.0
"""Predicted saving below which a region is not worth its guard, which takes about this long on the host."""
Written = tuple[CodeRegion, GeneratedCode]
"""A region and its accepted code."""


def worthwhile(regions: Regions, settings: Settings) -> Regions:
    """The regions for which some action is predicted to save more time than a guard takes."""
    planner, device = RooflinePlanner.of(settings), planning_model(settings.archs)
    chosen = []
    for capture in regions.captures:
        root = BuiltinCoder(device).start(capture, "")
        if any(
            action.expected.saved_us >= LEAST_SAVED_US
            for action in planner.ranked(State(capture, root, (), device, False))
        ):
            chosen.append(capture)
    return replace(regions, captures=tuple(chosen))


def with_notes(regions: Regions) -> tuple[Capture, ...]:
    """The captures of the regions, those with the most memory traffic first, with a note on what is not in a region."""
    found = [region for capture in regions.captures if (region := capture.workload.target.region) is not None]
    names = [region.lines for region in found]
    what = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    verb = "is" if names == [f"line {found[0].start_line}"] else "are"
    cuts = "; ".join(f"line {cut.line} {cut.reason}" for cut in regions.cuts)
    note = f"only {what} {verb} optimised, in place{f': {cuts}' if cuts else ''}"
    captures = [
        replace(capture, workload=replace(capture.workload, assumed=(*capture.workload.assumed, note)))
        for capture in regions.captures
    ]
    return tuple(sorted(captures, key=_written_bytes, reverse=True))


def _written_bytes(capture: Capture) -> int:
    """Bytes that the region's operations write in eager mode."""
    kinds = (kind for node in capture.graph.nodes for kind in node.outputs)
    return sum(kind.numel.value(capture.graph.sizes) * itemsize(kind.dtype) for kind in kinds)


class RegionCoder:
    """A coder for one region. Its versions of the file also contain the accepted code of the regions before it."""

    def __init__(self, coder: Coder, earlier: Sequence[Written]) -> None:
        """Wrap ``coder``, which writes files with the code of its region alone."""
        self._coder, self._earlier = coder, earlier

    def start(self, capture: Capture, source: str) -> Candidate:
        """The user's file with the code of the earlier regions."""
        return self._completed(self._coder.start(capture, source), capture.workload.target)

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """The version with ``action`` applied to this region.

        Raises:
            CannotCode: the coder cannot express the action.
        """
        return self._completed(self._coder.write(capture, candidate, action), capture.workload.target)

    def _completed(self, candidate: Candidate, target: Target) -> Candidate:
        own = [(target.region, candidate.code)] if target.region is not None and candidate.code is not None else []
        written = sorted([*self._earlier, *own], key=lambda item: item[0].first)
        plain = strip_generated(candidate.source.encode(), target.qualname)
        text = compose(plain, target, joined(written)).decode()
        return replace(candidate, id=content_id(text), source=text)


def joined(written: Sequence[Written]) -> GeneratedCode:
    """The code of several regions as one block, with a dispatch statement for each."""
    imports = dict.fromkeys(statement for _, code in written for statement in code.imports)
    # Regions share helper functions, such as those of guards.
    definitions = dict.fromkeys(part.strip("\n") for _, code in written for part in code.block.split("\n\n\n"))
    block = "\n\n\n".join(definitions) + "\n"
    dispatches = tuple((region, code.dispatch) for region, code in written)
    return GeneratedCode(tuple(imports), block, "", place=written[0][1].place, regions=dispatches)


def accepted_code(result: RunResult, region: CodeRegion | None) -> list[Written]:
    """The region's code if the result keeps any."""
    codes = [
        step.candidate.code
        for step in result.steps
        if step.status is StepStatus.ACCEPTED and step.candidate is not None and step.candidate.code is not None
    ]
    return [(region, codes[-1])] if region is not None and codes and result.status in KEPT else []


def continued(events: Events, number: int, offset: int) -> Events:
    """Events for the search of one region, whose steps are numbered from 1, in a run that has had ``offset`` steps."""

    def moved(report: Callable[[Step], None]) -> Callable[[Step], None]:
        return lambda step: report(replace(step, index=step.index + offset, region=number))

    return replace(
        events,
        on_action=lambda index, action: events.on_action(index + offset, action),
        on_step=moved(events.on_step),
        on_replayed=moved(events.on_replayed),
        on_withdrawn=moved(events.on_withdrawn),
        on_retimed=moved(events.on_retimed),
        on_switched=moved(events.on_switched),
    )


def steps_of(steps: Sequence[Step], number: int) -> list[Step]:
    """The steps of one region, numbered from 1."""
    own = [step for step in steps if step.region == number]
    return [replace(step, index=index) for index, step in enumerate(own, 1)]


def merged(results: Sequence[tuple[CodeRegion | None, RunResult]], plain: str) -> RunResult:
    """The result of a run from those of its regions, in the order in which they were optimised.

    Args:
        plain: the user's file.
    """
    if len(results) == 1:
        region, result = results[0]
        # The compiler was timed on the region alone, and its decorator is for the whole target.
        return result if region is None else replace(result, offer=None)
    steps: list[Step] = []
    for region, result in results:
        number = region.number if region is not None else 0
        offset = len(steps)
        steps += [replace(step, index=step.index + offset, region=number) for step in result.steps]
    kept = [result for _, result in results if result.status in KEPT]
    main, last = kept[0] if kept else results[0][1], results[-1][1]
    final = replace(
        main.final,
        source=last.final.source,
        diff=unified_diff(plain, last.final.source, main.target.path.rpartition("/")[2]),
        speedup=_total(kept),
    )
    return replace(
        main,
        target=replace(main.target, region=None),
        steps=tuple(steps),
        final=final,
        status=main.status if kept else _status([result.status for _, result in results]),
        offer=None,
        seconds=sum(result.seconds for _, result in results),
        end_reason=last.end_reason,
    )


def _status(statuses: Sequence[RunStatus]) -> RunStatus:
    """The status of a run that keeps nothing."""
    return RunStatus.INCORRECT if all(item is RunStatus.INCORRECT for item in statuses) else RunStatus.NO_GAIN


def _total(results: Sequence[RunResult]) -> Speedup | None:
    """The speedups of all kept regions together: their times before, over their times after."""
    timed = [(result.final.speedup, _eager_us(result)) for result in results if result.final.speedup is not None]
    if not timed:
        return None
    return Speedup(
        _ratio([(speedup.vs_eager, us) for speedup, us in timed]),
        _ratio([(speedup.vs_compile, us) for speedup, us in timed]),
        _ratio([(speedup.vs_best, us) for speedup, us in timed]),
    )


def _eager_us(result: RunResult) -> float:
    return next((baseline.median_us for baseline in result.baselines if baseline.name == "eager"), 0.0)


def _ratio(parts: Sequence[tuple[Ratio | None, float]]) -> Ratio | None:
    """The ratio of the sums of times before and after, from each part's ratio and weight."""
    known = [(ratio, weight) for ratio, weight in parts if ratio is not None and weight > 0]
    if len(known) < len(parts) or not known:
        return None
    total = sum(weight for _, weight in known)

    def over(values: Sequence[float]) -> float:
        return total / sum(weight / value for value, (_, weight) in zip(values, known, strict=True))

    return Ratio(
        over([ratio.ratio for ratio, _ in known]),
        over([ratio.low for ratio, _ in known]),
        over([ratio.high for ratio, _ in known]),
    )


def merged_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """The first verdict that is not correct; else all checks together."""
    for verdict in verdicts:
        if not verdict.is_correct:
            return verdict
    return replace(
        verdicts[0],
        checks=tuple(check for verdict in verdicts for check in verdict.checks),
        error=max(verdict.error for verdict in verdicts),
        reference_error=max(verdict.reference_error for verdict in verdicts),
        notes=tuple(dict.fromkeys(note for verdict in verdicts for note in verdict.notes)),
    )
