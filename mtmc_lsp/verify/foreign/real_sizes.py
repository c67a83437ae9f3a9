"""Runs a candidate at the workload's sizes under the interpreter, by a sample of its programs where all would take too long."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.dtypes import is_float, itemsize
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import Check, CheckStatus, VerdictStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.adapters import Adapter
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.case_runner import STOPS, CaseRunner
from mtmc_lsp.verify.cases import PEAKS_IN_PART, Case
from mtmc_lsp.verify.edge_cases import exceeds_workload, long_sizes, reduces, with_blocks
from mtmc_lsp.verify.messages import CallPlan
from mtmc_lsp.verify.outcomes import ALL_PROGRAMS, REAL_SIZES, CaseOutcome, skipped
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.sizes.case_sizes import conditions_allow
from mtmc_lsp.verify.sizes.interpreter_limits import product_work
from mtmc_lsp.verify.trials import full_trial

SAMPLE_SECONDS, WHOLE_SECONDS = 0.5, 3.0
"""Processor time for a sample of the programs of one launch, and the time that all of them may take instead."""
UNREAD_SECONDS = 48.0
"""The time that all programs may take if they seem to leave out elements, which only all of them show."""
NOT_COMPARABLE = "without float64, random numbers cannot be compared"
TOO_LARGE = "the tensors or products take too much memory or time on the CPU"
MOST_BYTES = 600e6
"""Limit for the bytes of all tensors of the graph: inputs exist several times, and a candidate has 8 GiB."""
MOST_WORK, MOST_NARROW_WORK = 4e10, 2e9
"""Limits for the multiply-adds of the reference on the CPU, which take about a second: in float32, and in 16 bits."""
FLOAT64_PART = 0.25
"""Parts of these limits where the float64 oracle, with several draws of rounding, decides which indices tie."""
SEED = 300
LEAST = 64
"""Sizes are not made smaller than this."""


def needs_oracle(capture: Capture) -> bool:
    """Whether results cannot be compared without float64, because they may depend on indices of scores that tie."""
    kinds = [kind for node in capture.graph.nodes for kind in node.outputs]
    return not all(is_float(kind.dtype) or kind.dtype == "bool" for kind in kinds)


def largest_sizes(capture: Capture) -> dict[str, int]:
    """The workload's sizes; if they are too large for the CPU, the largest variable one is halved until they are not.

    Empty if that is not enough.
    """
    graph = capture.graph
    sizes, part = dict(graph.sizes), FLOAT64_PART if needs_oracle(capture) else 1.0
    while not _fits(graph, sizes, part):
        names = [name for name in capture.variable_sizes if sizes.get(name, 0) > LEAST]
        if not names:
            return {}
        largest = max(names, key=lambda name: sizes[name])
        sizes[largest] = max(LEAST, math.ceil(sizes[largest] / 2))
    return sizes if conditions_allow(graph, sizes) else {}


def _fits(graph: Graph, sizes: dict[str, int], part: float) -> bool:
    """Whether the reference can run at these sizes, within a part of the limits."""
    kinds = [item.type for item in graph.inputs] + [kind for node in graph.nodes for kind in node.outputs]
    size = sum(kind.numel.value(sizes) * itemsize(kind.dtype) for kind in kinds)
    is_narrow = any(is_float(kind.dtype) and itemsize(kind.dtype) < 4 for kind in kinds)
    most_work = MOST_NARROW_WORK if is_narrow else MOST_WORK
    return size <= part * MOST_BYTES and product_work(graph, sizes) <= part * most_work


@dataclass(frozen=True)
class RealSizes:
    """What a call at the workload's sizes needs."""

    reference: Reference
    process: CandidateProcess
    candidate: Adapter
    init: str
    """The constructor's arguments in the user's file, as in :class:`~mtmc_lsp.verify.trials.Trial`."""

    def outcomes(self, passed: Sequence[CaseOutcome], on_case: Callable[[Case], None]) -> list[CaseOutcome]:
        """The outcomes at sizes that no case had. Where nothing ran or could be compared, a skipped check says why.

        Args:
            passed: the outcomes of all cases.
            on_case: called before the candidate runs.
        """
        capture, ran = self.reference.capture, [dict(outcome.case.sizes) for outcome in passed if outcome.ran]
        largest = largest_sizes(capture)
        why = TOO_LARGE if not largest else NOT_COMPARABLE
        if not largest or capture.uses_random:
            case = self._case(dict(capture.graph.sizes), 0)
            return [] if dict(case.sizes) in ran else [skipped(case, REAL_SIZES, why, ran=False)]
        choices = [sizes for sizes in (largest, *self._long_sizes()) if sizes not in ran]
        outcomes: list[CaseOutcome] = []
        if largest != capture.graph.sizes:
            real = self._case(dict(capture.graph.sizes), 0)
            instead = Case(largest, real.distribution, real.seed).sizes_text(capture.graph)
            outcomes.append(skipped(real, REAL_SIZES, f"{TOO_LARGE}, so {instead} ran instead", ran=False))
        for i, sizes in enumerate(choices):
            case = self._case(sizes, i)
            on_case(case)
            outcomes.append(self._outcome(capture, case))
            if not outcomes[-1].is_correct:
                break
        return outcomes

    def _case(self, sizes: Mapping[str, int], number: int) -> Case:
        capture = self.reference.capture
        distribution = with_blocks(PEAKS_IN_PART, self._text) if reduces(capture) else "normal"
        return Case(
            sizes,
            distribution,
            self.reference.seed + SEED + number,
            may_be_refused=exceeds_workload(capture, sizes),
            has_oracle=needs_oracle(capture),
        )

    @property
    def _text(self) -> str:
        """The candidate's file."""
        return self.candidate.source(full_trial(self.reference.capture, self.init)).text

    def _long_sizes(self) -> list[dict[str, int]]:
        capture = self.reference.capture
        graph, part = capture.graph, FLOAT64_PART if needs_oracle(capture) else 1.0
        trial = full_trial(capture, self.init)
        return [
            sizes
            for sizes in long_sizes(trial.capture, self._text)
            if conditions_allow(graph, sizes) and _fits(graph, sizes, part)
        ]

    def _outcome(self, capture: Capture, case: Case) -> CaseOutcome:
        try:
            outcome = self._run(capture, case)
            if outcome is not None and outcome.status is VerdictStatus.INCORRECT and not case.has_oracle:
                # The reference itself may be further from the exact result than the tolerance, which only float64 shows.
                outcome = self._run(capture, replace(case, has_oracle=True))
        except MtmcError as error:
            if error.kind in STOPS:
                raise
            return skipped(case, REAL_SIZES, error.message, ran=False)
        why = "the reference does not accept these inputs" if outcome is None else self._not_compared(outcome)
        if outcome is None or why:
            return skipped(case, REAL_SIZES, why, ran=False)
        if outcome.is_correct and not outcome.ran:
            # It refuses sizes that are larger than the workload's.
            return outcome
        if outcome.is_correct:
            check = Check(REAL_SIZES, CheckStatus.PASSED, case.label, _shares(outcome) or ALL_PROGRAMS)
            return replace(outcome, checks=(*outcome.checks, check))
        return replace(outcome, reason=f"{outcome.reason} (on {case.text(capture.graph)})")

    def _run(self, capture: Capture, case: Case) -> CaseOutcome | None:
        """The outcome of a sample of the programs, or of all; ``None`` if the reference does not accept the inputs."""
        trial = full_trial(capture, self.init)
        runner = CaseRunner(self.reference, self.process, self.candidate, trial, finds_trivial=False)
        prepared = self.reference.prepare(trial, [case], first=None)[0]
        plan = CallPlan(sample_seconds=SAMPLE_SECONDS, whole_seconds=WHOLE_SECONDS)
        outcome = runner.outcome(prepared, plan)
        if outcome is not None and outcome.unread:
            return runner.outcome(prepared, replace(plan, whole_seconds=UNREAD_SECONDS)) or outcome
        return outcome

    def _not_compared(self, outcome: CaseOutcome) -> str:
        """Why the call proves nothing: a limit ended it, its results were not compared, or it launched no kernel."""
        if outcome.status in (VerdictStatus.TIMEOUT, VerdictStatus.CRASHED) or outcome.is_out_of_memory:
            return outcome.reason
        if outcome.uncompared:
            shares = _shares(outcome)
            return "; ".join(text for text in (f"{outcome.uncompared} ({shares} ran)", outcome.unread) if text)
        lacks_kernel = self.candidate.needs_kernel and outcome.ran and not outcome.launches
        return "no kernel was launched" if lacks_kernel else ""


def _shares(outcome: CaseOutcome) -> str:
    """How many programs of each kernel ran, of those that did not run whole."""
    shares = (f"{ran} of {total} programs of {name}" for name, ran, total in outcome.programs if ran < total)
    return ", ".join(dict.fromkeys(shares))
