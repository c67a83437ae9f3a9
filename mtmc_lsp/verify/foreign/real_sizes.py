"""Runs a candidate at the workload's sizes under the interpreter, by a sample of its programs where all would take too long."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.dtypes import is_float, itemsize
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import Check, CheckStatus, VerdictStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.adapters import Adapter
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.case_runner import STOPS, CaseRunner
from mtmc_lsp.verify.cases import Case, conditions_allow, product_work
from mtmc_lsp.verify.edge_cases import exceeds_workload, long_sizes
from mtmc_lsp.verify.messages import CallPlan
from mtmc_lsp.verify.outcomes import CaseOutcome
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.trials import full_trial

REAL_SIZES = "workload's sizes"
"""The name of the check."""
SAMPLE_SECONDS, WHOLE_SECONDS = 1.0, 3.0
"""Processor time for a sample of the programs of one launch, and the time that all of them may take instead."""
MOST_BYTES = 400e6
"""Limit for the bytes of all tensors of the graph: inputs exist several times, and a candidate has 8 GiB."""
MOST_WORK, MOST_NARROW_WORK = 4e10, 2e9
"""Limits for the multiply-adds of the reference on the CPU, which take about a second: in float32, and in 16 bits."""
SEED = 300
LEAST = 64
"""Sizes are not made smaller than this."""


def is_comparable(capture: Capture) -> bool:
    """Whether results can be compared without float64: not random numbers, nor indices of scores that may tie."""
    kinds = [kind for node in capture.graph.nodes for kind in node.outputs]
    return not capture.uses_random and all(is_float(kind.dtype) or kind.dtype == "bool" for kind in kinds)


def largest_sizes(capture: Capture) -> dict[str, int]:
    """The workload's sizes; if they are too large for the CPU, the largest variable one is halved until they are not.

    Empty if that is not enough.
    """
    graph = capture.graph
    sizes = dict(graph.sizes)
    while not _fits(graph, sizes):
        names = [name for name in capture.variable_sizes if sizes.get(name, 0) > LEAST]
        if not names:
            return {}
        largest = max(names, key=lambda name: sizes[name])
        sizes[largest] = max(LEAST, math.ceil(sizes[largest] / 2))
    return sizes if conditions_allow(graph, sizes) else {}


def _fits(graph: Graph, sizes: dict[str, int]) -> bool:
    kinds = [item.type for item in graph.inputs] + [kind for node in graph.nodes for kind in node.outputs]
    size = sum(kind.numel.value(sizes) * itemsize(kind.dtype) for kind in kinds)
    is_narrow = any(is_float(kind.dtype) and itemsize(kind.dtype) < 4 for kind in kinds)
    return size <= MOST_BYTES and product_work(graph, sizes) <= (MOST_NARROW_WORK if is_narrow else MOST_WORK)


@dataclass(frozen=True)
class RealSizes:
    """What a call at the workload's sizes needs."""

    reference: Reference
    process: CandidateProcess
    candidate: Adapter
    init: str
    """The constructor's arguments in the user's file, as in :class:`~mtmc_lsp.verify.trials.Trial`."""

    def outcomes(self, passed: Sequence[CaseOutcome], on_case: Callable[[Case], None]) -> list[CaseOutcome]:
        """The outcome, if no case had these sizes, time and memory suffice, and the results can be compared.

        Args:
            passed: the outcomes of all cases.
            on_case: called before the candidate runs.
        """
        capture, ran = self.reference.capture, [dict(outcome.case.sizes) for outcome in passed if outcome.ran]
        if not is_comparable(capture):
            return []
        choices = [sizes for sizes in (largest_sizes(capture), *self._long_sizes()) if sizes and sizes not in ran]
        outcomes: list[CaseOutcome] = []
        for i, sizes in enumerate(choices):
            is_larger = exceeds_workload(capture, sizes)
            case = Case(sizes, "normal", self.reference.seed + SEED + i, may_be_refused=is_larger, has_oracle=False)
            on_case(case)
            outcomes += self._outcomes(capture, case)
            if outcomes and not outcomes[-1].is_correct:
                break
        return outcomes

    def _long_sizes(self) -> list[dict[str, int]]:
        graph = self.reference.capture.graph
        trial = full_trial(self.reference.capture, self.init)
        text = self.candidate.source(trial).text
        return [
            sizes for sizes in long_sizes(trial.capture, text) if conditions_allow(graph, sizes) and _fits(graph, sizes)
        ]

    def _outcomes(self, capture: Capture, case: Case) -> list[CaseOutcome]:
        trial = full_trial(capture, self.init)
        runner = CaseRunner(self.reference, self.process, self.candidate, trial, finds_trivial=False)
        prepared = self.reference.prepare(trial, [case], first=None)[0]
        try:
            outcome = runner.outcome(prepared, CallPlan(sample_seconds=SAMPLE_SECONDS, whole_seconds=WHOLE_SECONDS))
        except MtmcError as error:
            if error.kind in STOPS:
                raise
            return []
        if outcome is None or self._proves_nothing(outcome):
            return []
        if outcome.is_correct:
            check = Check(REAL_SIZES, CheckStatus.PASSED, case.label, _shares(outcome))
            return [replace(outcome, checks=(*outcome.checks, check))]
        return [replace(outcome, reason=f"{outcome.reason} (on {case.text(capture.graph)})")]

    def _proves_nothing(self, outcome: CaseOutcome) -> bool:
        """Whether a limit ended the call, its results were not compared, or it launched no kernel."""
        is_limit = outcome.status in (VerdictStatus.TIMEOUT, VerdictStatus.CRASHED) or outcome.is_out_of_memory
        lacks_kernel = self.candidate.needs_kernel and outcome.ran and not outcome.launches
        return is_limit or lacks_kernel or bool(outcome.uncompared)


def _shares(outcome: CaseOutcome) -> str:
    """How many programs of each kernel ran."""
    shares = (f"{ran} of {total} programs of {name}" for name, ran, total in outcome.programs if ran < total)
    return ", ".join(dict.fromkeys(shares)) or "all programs"
