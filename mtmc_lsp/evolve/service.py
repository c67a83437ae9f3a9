"""The service of an evolution: a process on a worker that tries versions beside what the service of a run does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.app.bench.conversation import Answering, converse
from mtmc_lsp.app.remote.service import Service, open_service
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.evolve.local_runner import Here, LocalRunner
from mtmc_lsp.evolve.trials import TrialRequest, TrialResult
from mtmc_lsp.evolve.workloads import Workloads
from mtmc_lsp.process.protocol import Request

SERVICE = "mtmc_lsp.evolve.service"


@dataclass(frozen=True)
class Conditions:
    """The workloads and architectures for which versions of an evolution are tried."""

    points: tuple[tuple[str, dict[str, int]], ...]
    """The workloads: name and sizes."""
    archs: tuple[str, ...]


@dataclass(frozen=True)
class TryVersionRequest(Request[TrialResult], command="evolve.try"):
    """Try a version beside its parent."""

    conditions: Conditions
    trial: TrialRequest


@dataclass(frozen=True)
class Times:
    """Microseconds a call on every workload."""

    times_us: tuple[float, ...]


@dataclass(frozen=True)
class BaselineRequest(Request[Times], command="evolve.baseline"):
    """Time the user's code."""

    conditions: Conditions
    root: Candidate


class _Trials:
    """The trials of one service: its runner opens at the first one."""

    def __init__(self, service: Service, resources: contextlib.ExitStack) -> None:
        self._service, self._resources = service, resources
        self._runner: tuple[Conditions, LocalRunner] | None = None
        service.add(TryVersionRequest, self._try)
        service.add(BaselineRequest, self._baseline)

    def _try(self, request: TryVersionRequest) -> TrialResult:
        (result,) = self._runner_for(request.conditions).run([request.trial])
        return result

    def _baseline(self, request: BaselineRequest) -> Times:
        return Times(self._runner_for(request.conditions).baseline(request.root))

    def _runner_for(self, conditions: Conditions) -> LocalRunner:
        if self._runner is None or self._runner[0] != conditions:
            self._resources.close()
            target, pipeline = self._service.pipeline.target, self._service.pipeline
            # The calling process limits the time of each trial.
            here = Here(
                pipeline.capture(),
                target.plain.decode(),
                target.python,
                conditions.archs,
                Workloads(conditions.points),
                math.inf,
                self._service.fork_server,
                self._service.opening.needs_sandbox,
            )
            runner = LocalRunner(here, self._service.measurer(0))
            self._resources.callback(runner.close)
            self._runner = (conditions, runner)
        return self._runner[1]


@contextlib.contextmanager
def _answering(data: Any) -> Iterator[Answering]:
    with open_service(data) as service, contextlib.ExitStack() as resources:
        _Trials(service, resources)
        yield service.answer


if __name__ == "__main__":
    converse(_answering)
