"""A service: a process on a worker that captures, compiles, verifies and times for a run on the user's machine.

User code and generated code run in the pipeline's worker processes, as on the user's machine.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtmc_lsp.app.bench.conversation import Answering, converse
from mtmc_lsp.app.pipeline import Pipeline, PipelineMeasurer, RunOptions
from mtmc_lsp.app.remote.messages import (
    Baselines,
    Captured,
    CaptureRequest,
    CompileRequest,
    DeviceRequest,
    IsolationRequest,
    KernelTimes,
    KernelTimesRequest,
    OffsetsRequest,
    Opening,
    Ranked,
    RankRequest,
    Recompilations,
    RecompilationsRequest,
    TimeAllRequest,
    Timed,
    TimeRequest,
    Tried,
    TryRequest,
    UntimedRequest,
    VerifyRequest,
)
from mtmc_lsp.app.target_file import Request as TargetRequest
from mtmc_lsp.app.target_file import open_target
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.results import Check, CompileReport, Verdict
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.process.priority import limit_to_cores
from mtmc_lsp.process.protocol import Answer, Request
from mtmc_lsp.process.sandbox import Isolation


class Service:
    """Answers requests about one target."""

    def __init__(self, opening: Opening, pipeline: Pipeline, fork_server: ForkServer) -> None:
        """Prepare.

        Args:
            fork_server: starts the workers of the pipeline.
        """
        self.opening, self.pipeline, self.fork_server = opening, pipeline, fork_server
        self._handlers: dict[str, tuple[type[Request[Any]], Callable[[Any], Any]]] = {}
        self.add(CaptureRequest, lambda request: Captured(pipeline.captures()))
        self.add(IsolationRequest, self._isolation)
        self.add(DeviceRequest, self._device)
        self.add(CompileRequest, self._compile)
        self.add(VerifyRequest, self._verify)
        self.add(TimeRequest, self._time)
        self.add(TimeAllRequest, self._time_all)
        self.add(TryRequest, self._try)
        self.add(RankRequest, self._rank)
        self.add(KernelTimesRequest, self._kernel_times)
        self.add(OffsetsRequest, self._offsets)
        self.add(UntimedRequest, self._untimed)
        self.add(RecompilationsRequest, self._recompilations)

    def add(self, kind: type[Request[Answer]], handler: Callable[[Any], Answer]) -> None:
        """Answer a further kind of requests."""
        self._handlers[kind.command] = (kind, handler)

    def answer(self, command: str, data: Any) -> Any:
        """The answer to a request, as JSON data.

        Raises:
            MtmcError: the error that the request leads to.
        """
        kind, handler = self._handlers[command]
        return to_json(handler(from_json(kind, data)))

    def measurer(self, index: int) -> PipelineMeasurer:
        """The measurer for versions of a region."""
        self.pipeline.select(index)
        return self.pipeline.measurer()

    def _isolation(self, request: IsolationRequest) -> Isolation:
        return self.measurer(request.index).isolation()

    def _device(self, request: DeviceRequest) -> DeviceModel:
        return self.measurer(request.index).device()

    def _compile(self, request: CompileRequest) -> CompileReport:
        return self.measurer(request.index).compile(request.candidate)

    def _verify(self, request: VerifyRequest) -> Verdict:
        return self.measurer(request.index).verify(request.candidate)

    def _time(self, request: TimeRequest) -> Timed:
        return Timed(self.measurer(request.index).time(request.candidate, request.previous))

    def _time_all(self, request: TimeAllRequest) -> Timed:
        measurer = self.measurer(request.index)
        return Timed(measurer.time_with_baselines(request.candidate, request.previous, request.wait))

    def _try(self, request: TryRequest) -> Tried:
        measurer, candidate, tried = self.measurer(request.index), request.candidate, Tried()
        try:
            report = measurer.compile(candidate)
            tried = Tried(report)
            if request.verifies and report.ok:
                tried = Tried(report, measurer.verify(candidate))
            is_correct = tried.verdict is None or tried.verdict.is_correct
            if request.times and report.ok and is_correct:
                tried = replace(tried, timing=measurer.time(candidate, request.previous))
        except MtmcError as error:
            return replace(tried, error=error.to_json())
        return tried

    def _rank(self, request: RankRequest) -> Ranked:
        measurer = self.measurer(request.index)
        reports = measurer.compile_variants(request.candidates)
        compiled = [number for number, report in enumerate(reports) if report.ok]
        medians: list[float | None] = [None] * len(reports)
        for number, median in zip(
            compiled, measurer.quick([request.candidates[number] for number in compiled]), strict=True
        ):
            medians[number] = median
        return Ranked(tuple(reports), tuple(medians))

    def _kernel_times(self, request: KernelTimesRequest) -> KernelTimes:
        return KernelTimes(self.measurer(request.index).kernel_times(request.candidate))

    def _offsets(self, request: OffsetsRequest) -> Check:
        return self.measurer(request.index).verify_int32_offsets(request.candidate)

    def _untimed(self, request: UntimedRequest) -> Baselines:
        return Baselines(self.measurer(request.index).untimed_baselines())

    def _recompilations(self, request: RecompilationsRequest) -> Recompilations:
        return Recompilations(*self.measurer(request.index).recompilations())


@contextlib.contextmanager
def open_service(data: Any) -> Iterator[Service]:
    """The service of an opening, with its pipeline."""
    opening = from_json(Opening, data)
    limit_to_cores(opening.cores)
    target = open_target(TargetRequest(Path(opening.path), opening.target, opening.settings, opening.python))
    with (
        tempfile.TemporaryDirectory(prefix="mtmc-run-") as store,
        ForkServer(opening.python, likely_variables(), preload=True) as fork_server,
    ):
        fork_server.start()
        options = RunOptions(
            fresh=opening.fresh,
            needs_sandbox=opening.needs_sandbox,
            store=Path(store),
            fork_server=fork_server,
            captures=opening.captures,
        )
        with Pipeline(target, options) as pipeline:
            yield Service(opening, pipeline, fork_server)


@contextlib.contextmanager
def _answering(data: Any) -> Iterator[Answering]:
    with open_service(data) as service:
        yield service.answer


if __name__ == "__main__":
    converse(_answering)
