"""Tries versions on this machine: by Triton's interpreter and the cost model, or on its GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from mtmc_lsp.app.pipeline import PipelineMeasurer
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.results import CompileReport
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve.estimates import estimate_us, launches_of, memory_of
from mtmc_lsp.evolve.fitness import ERRORS
from mtmc_lsp.evolve.lineage import TOLERANCE
from mtmc_lsp.evolve.trials import Measured, Stage, TrialRequest, TrialResult
from mtmc_lsp.evolve.workloads import Workloads, at_sizes
from mtmc_lsp.explore.judgement import GOOD, Judgement, SiblingMeasurer
from mtmc_lsp.explore.measuring import Place, open_measurer
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.search.failures import failure_reason

UNKNOWN_US = 1000.0
"""Stands for the time of user's code that cannot be read or timed; only relations to it are used."""
NO_ESTIMATE = "the cost model has no estimate for it, and without a GPU nothing is timed"


@dataclass(frozen=True)
class Here:
    """Where versions are tried."""

    capture: Capture
    source: str
    """The user's file without generated code."""
    python: str
    archs: tuple[str, ...]
    workloads: Workloads
    deadline: float
    """Time of the monotonic clock after which nothing continues."""
    fork_server: ForkServer | None = None
    """Starts the processes; the caller closes it."""
    needs_sandbox: bool = False
    """Whether to refuse versions without a complete sandbox."""


class LocalRunner:
    """A :class:`~mtmc_lsp.evolve.trials.TrialRunner` on this machine."""

    def __init__(self, here: Here, verifier: PipelineMeasurer) -> None:
        """Start the processes.

        Args:
            verifier: verifies versions on a GPU, where a timing compares only the timed inputs; the caller closes it.
        """
        self._here, self._verifier = here, verifier
        self._captures = [at_sizes(here.capture, sizes) for _, sizes in here.workloads.points]
        self._resources = ExitStack()
        places = [
            Place(capture, here.source, here.python, here.archs, here.fork_server, here.deadline, here.needs_sandbox)
            for capture in self._captures
        ]
        self.has_gpu = places[0].has_gpu
        # The cost model estimates every workload, so the interpreter verifies one.
        self._measurers: list[SiblingMeasurer] = [
            self._resources.enter_context(closing(open_measurer(place)))
            for place in (places if self.has_gpu else places[:1])
        ]

    def device(self) -> DeviceModel:
        return self._measurers[0].device()

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        return self._verifier.kernel_times(candidate) if self.has_gpu else ()

    def close(self) -> None:
        self._resources.close()

    def baseline(self, root: Candidate) -> tuple[float, ...]:
        if not self.has_gpu:
            device = self.device()
            return tuple(estimate_us(capture, root, device) or UNKNOWN_US for capture in self._captures)
        return tuple(measurer.judge(root, [[root]])[0][0].before_us or UNKNOWN_US for measurer in self._measurers)

    def resources(self, candidate: Candidate) -> tuple[float, int]:
        graph = self._here.capture.graph
        return memory_of(graph, candidate), launches_of(graph, candidate)

    def run(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        began = time.monotonic()
        reports = self._measurers[0].compile([request.candidate for request in requests]) if requests else []
        shared = (time.monotonic() - began) / max(1, len(requests))
        results = []
        for request, report in zip(requests, reports, strict=True):
            began = time.monotonic()
            result = self._tried(request, report)
            results.append(replace(result, seconds=shared + time.monotonic() - began))
        return results

    # One version -------------------------------------------------------------------------------------------------

    def _tried(self, request: TrialRequest, report: CompileReport) -> TrialResult:
        candidate = request.candidate
        compiled = "\n".join(f"{kernel.kernel} for {kernel.arch}: {kernel.summary}" for kernel in report.kernels)
        memory, launches = self.resources(candidate)
        result = TrialResult(Outcome.CORRECT, compiled=compiled, memory=memory, launches=launches)
        if not report.ok:
            broken = next(kernel for kernel in report.kernels if kernel.error)
            outcome = Outcome.OUT_OF_TIME if report.ran_out_of_time else Outcome.COMPILE_ERROR
            return replace(
                result, outcome=outcome, detail=f"{broken.kernel} does not compile for {broken.arch}: {broken.error}"
            )
        if request.stage is Stage.COMPILE:
            return result
        return self._measured(request, result) if self.has_gpu else self._estimated(request, result)

    def _estimated(self, request: TrialRequest, result: TrialResult) -> TrialResult:
        ((judgement,),) = self._measurers[0].judge(request.parent, [[request.candidate]])
        if judgement.outcome not in GOOD:
            return _failed(result, judgement)
        device, workloads = self.device(), list[Measured]()
        for capture in self._captures:
            us, before = (estimate_us(capture, version, device) for version in (request.candidate, request.parent))
            if us is None or before is None:
                return replace(result, detail=NO_ESTIMATE)
            workloads.append(Measured(us, before / us))
        return replace(result, workloads=tuple(workloads))

    def _measured(self, request: TrialRequest, result: TrialResult) -> TrialResult:
        workloads = []
        for measurer in self._measurers if request.stage is Stage.SCORE else self._measurers[:1]:
            ((judgement,),) = measurer.judge(request.parent, [[request.candidate]])
            if judgement.outcome not in GOOD:
                return _failed(result, judgement)
            if judgement.after_us is not None and judgement.ratio is not None:
                workloads.append(Measured(judgement.after_us, judgement.ratio, judgement.ratio_error or 0.0))
        if workloads and all(item.ratio + ERRORS * item.error < 1.0 - TOLERANCE for item in workloads):
            # It is slower everywhere, so that nobody needs to know whether it is correct.
            return replace(result, outcome=Outcome.SLOWER, workloads=tuple(workloads))
        verified = self._verified(request.candidate, result)
        return replace(verified, workloads=tuple(workloads)) if verified.outcome in GOOD else verified

    def _verified(self, candidate: Candidate, result: TrialResult) -> TrialResult:
        """The whole verification: on a GPU it takes seconds."""
        try:
            verdict = self._verifier.verify(candidate)
        except MtmcError as error:
            if error.kind is FailureKind.DEADLINE:
                raise
            return replace(result, outcome=Outcome.WRONG, detail=failure_reason(error))
        if verdict.failure is FailureKind.DEADLINE:
            raise WorkerFailed(verdict.reason, kind=FailureKind.DEADLINE)
        return result if verdict.is_correct else replace(result, outcome=Outcome.WRONG, detail=verdict.reason)


def _failed(result: TrialResult, judgement: Judgement) -> TrialResult:
    return replace(result, outcome=judgement.outcome, detail=judgement.detail or judgement.outcome.value)
