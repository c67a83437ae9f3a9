"""Tries the versions of a generation on the workers of a cluster, all at the same time. A version and its parent share a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.app.pipeline import PipelineMeasurer
from mtmc_lsp.app.remote.target import Pending, RemoteTarget
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.evolve.estimates import launches_of, memory_of
from mtmc_lsp.evolve.local_runner import Here
from mtmc_lsp.evolve.service import BaselineRequest, Conditions, TryVersionRequest
from mtmc_lsp.evolve.trials import TrialRequest, TrialResult
from mtmc_lsp.search.failures import failure_reason

FAULTS_OF_A_VERSION = (FailureKind.CRASHED, FailureKind.TIMEOUT)
"""A service, or several workers, that ended while a version was tried."""


class RemoteRunner:
    """A :class:`~mtmc_lsp.evolve.trials.TrialRunner` on the workers of a cluster."""

    def __init__(self, remote: RemoteTarget, here: Here, measurer: PipelineMeasurer) -> None:
        """Prepare.

        Args:
            here: the target and its workloads.
            measurer: profiles versions on the workers; the caller closes it.
        """
        self._remote, self._here, self._measurer = remote, here, measurer
        self._conditions = Conditions(here.workloads.points, here.archs)
        self.has_gpu = measurer.has_gpu

    def device(self) -> DeviceModel:
        return self._measurer.device()

    def baseline(self, root: Candidate) -> tuple[float, ...]:
        return self._remote.call(BaselineRequest(self._conditions, root), self._here.deadline).times_us

    def resources(self, candidate: Candidate) -> tuple[float, int]:
        graph = self._here.capture.graph
        return memory_of(graph, candidate), launches_of(graph, candidate)

    def run(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        pending = [
            self._remote.submit(TryVersionRequest(self._conditions, request), self._here.deadline)
            for request in requests
        ]
        try:
            return [self._result(item) for item in pending]
        except BaseException:
            for item in pending:
                item.future.cancel()
            raise

    def _result(self, pending: Pending) -> TrialResult:
        try:
            result: TrialResult = self._remote.result(pending, self._here.deadline)
        except WorkerFailed as error:
            if error.kind not in FAULTS_OF_A_VERSION:
                raise
            return TrialResult(Outcome.OUT_OF_TIME, failure_reason(error))
        return result

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        return self._measurer.kernel_times(candidate)

    def close(self) -> None:
        """Nothing runs between two calls."""
