"""A runner that accepts every version of a real capture, with the estimates of the cost model as times. Nothing runs."""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.evolve.estimates import estimate_us, launches_of, memory_of
from mtmc_lsp.evolve.trials import Measured, Stage, TrialRequest, TrialResult
from mtmc_lsp.evolve.workloads import Workloads, at_sizes

H200 = model_of_arch("sm_90")


class Runner:
    """Accepts every version, or finds what ``wrong`` says in its text."""

    has_gpu = False

    def __init__(self, capture: Capture, wrong: str = "", workloads: Workloads | None = None) -> None:
        self._capture, self._wrong = capture, wrong
        points = workloads.points if workloads is not None else (("as captured", capture.graph.sizes),)
        self._captures = [at_sizes(capture, sizes) for _, sizes in points]
        self.requests: list[TrialRequest] = []

    def device(self) -> DeviceModel:
        return H200

    def baseline(self, root: Candidate) -> tuple[float, ...]:
        return tuple(estimate_us(capture, root, H200) or 1.0 for capture in self._captures)

    def resources(self, candidate: Candidate) -> tuple[float, int]:
        return memory_of(self._capture.graph, candidate), launches_of(self._capture.graph, candidate)

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        return ()

    def close(self) -> None:
        """Nothing to end."""

    def run(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        self.requests += requests
        return [self._tried(request) for request in requests]

    def _tried(self, request: TrialRequest) -> TrialResult:
        if self._wrong and self._wrong in request.candidate.source:
            return TrialResult(Outcome.WRONG, "values: relative error 0.5")
        workloads = []
        for capture in self._captures if request.stage is Stage.SCORE else ():
            us, before = (estimate_us(capture, version, H200) or 1.0 for version in (request.candidate, request.parent))
            workloads.append(Measured(us, before / us))
        memory, launches = self.resources(request.candidate)
        return TrialResult(
            Outcome.CORRECT,
            workloads=tuple(workloads),
            memory=memory,
            launches=launches,
            compiled="ranks_kernel for sm_90: 32 registers",
        )
