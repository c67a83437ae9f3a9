"""Times candidates on the GPU, in sandboxed processes: versions of the user's file and foreign candidates."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, TimeoutError
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, MtmcError
from mtmc_lsp.core.results import BaselineTime, Timing
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.calibration_cache import cached_device, remember_device
from mtmc_lsp.device.choice import calibrated_model
from mtmc_lsp.process.cache_files import cache_folder
from mtmc_lsp.process.gpu_lock import USING_ALONE, WAITING_ALONE, lock_folder, lock_seconds
from mtmc_lsp.process.protocol import Answer, Request
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.timing.bounds import bound_us, least_us
from mtmc_lsp.timing.messages import (
    SAMPLING_SECONDS,
    BaselinesRequest,
    CalibrationRequest,
    PrepareRequest,
    RankRequest,
    RecompilationsAnswer,
    RecompilationsRequest,
    SiblingsRequest,
    SiblingTime,
    TimeAnswer,
    TimeRequest,
)
from mtmc_lsp.timing.timekeeper import TIME_SECONDS, Timekeeper, TimingCache
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.messages import CandidateSource, LoadRequest
from mtmc_lsp.verify.reference import PreparedCase, Reference
from mtmc_lsp.verify.sizes.case_sizes import loop_operations

WAIT_FACTOR = 4
"""Factor on the time limit of a command that waits for the GPU lock itself."""
TRIAL_SAMPLING_SECONDS = 0.5
"""How long the timing of a trial takes samples; it ends earlier when the medians have converged, or the result is clear."""
COMPILE_SECONDS = 0.01
"""At least so long ``torch.compile`` takes for an operation of a loop, which it unrolls. It took 0.04 s on an H200's host
(``sparsemax_by_bisection``, 320 operations), and 0.058 s on one core of a machine without a GPU (2,200 operations)."""
LEFT_OUT = (
    "torch.compile was not started: it unrolls a loop of {operations:,} operations, which takes longer than the budget"
)
FAR_FASTER = 20.0
"""The speedup over eager mode from which on a trial is not timed again without further baselines."""


class Timer:
    """Times candidates of one capture.

    One process compiles the baselines, which may take a minute. Until then another one times candidates against eager mode and
    the previous version, so that no candidate waits.
    """

    def __init__(
        self,
        capture: Capture,
        user_source: str | None,
        pool: WorkerPool,
        process: CandidateProcess,
        trials: CandidateProcess | None = None,
        *,
        baselines: tuple[str, ...] = ("compile",),
        fresh: bool = False,
        seconds: float = TIME_SECONDS,
    ) -> None:
        """Prepare without timing.

        Args:
            user_source: the user's file; ``None`` reads the file.
            process: compiles the baselines and times against them; no verification runs in it.
            trials: calibrates, ranks, and times while ``process`` compiles. Without it, ``process`` does everything.
            baselines: modes of ``torch.compile`` to time besides eager mode: ``compile``, ``max-autotune``.
            fresh: whether to ignore cached timings.
            seconds: time limit for one candidate, including the preparation of the baselines.
        """
        self._capture, self._user_source, self._pool, self._process = capture, user_source, pool, process
        self._trials = trials or process
        self._baselines, self._fresh, self._seconds = baselines, fresh, seconds
        self._preparation: Future[bool] | None = None
        self._preparing_since = 0.0
        self._left_out = ""
        """Why the baselines are not compiled; empty if they are."""
        self._more: set[str] = set()
        """Further baselines that ``process`` compiled for some candidate."""
        self._error: MtmcError | None = None
        """Why there are no baselines, if their compilation failed."""
        self._is_lost = False
        """Whether ``process`` ended after it had compiled the baselines."""
        self._device: DeviceModel | None = None
        self._far_faster: dict[str, Timing] = {}
        """By text of a candidate: the timing of a trial that was faster than eager mode by :data:`FAR_FASTER`."""
        self._timekeepers: dict[CandidateProcess, Timekeeper[TimeRequest]] = {}

    def device(self) -> DeviceModel:
        """The calibrated model of the GPU; measured once per machine."""
        if self._device is None:
            environment = self._capture.environment
            self._device = cached_device(environment) or self._calibrate()
        return self._device

    def _calibrate(self) -> DeviceModel:
        environment = self._capture.environment
        if self._trials is self._process:
            # The process holds the shared GPU lock while it compiles the baselines.
            self.wait_for_baselines()
        with self._pool.exclusive_gpu():
            # Another run may have calibrated while this one waited for the GPU.
            device = cached_device(environment)
            if device is None:
                device = calibrated_model(environment, self._call(CalibrationRequest(), self._trials))
                remember_device(environment, device)
        return device

    def prepare_baselines(
        self, background: Executor, reference: Reference, first: PreparedCase, seconds: float = math.inf
    ) -> None:
        """Compile the baselines in the background; only the first call does.

        Args:
            background: runs the preparation.
            reference: shares the workload's inputs if they are large.
            first: the case that is the workload itself.
            seconds: the time that is left. If unrolling a loop certainly takes longer, nothing is compiled.
        """
        if self._preparation is None:
            self._preparing_since = time.monotonic()
            graph = self._capture.graph
            operations = loop_operations(graph, graph.sizes)
            if operations * COMPILE_SECONDS > seconds:
                self._left_out = LEFT_OUT.format(operations=operations)
                self._preparation = Future()
                self._preparation.set_result(False)
                return
            self._preparation = background.submit(self._prepare_baselines, reference, first)

    def _prepare_baselines(self, reference: Reference, first: PreparedCase) -> bool:
        try:
            with reference.sharing_workload(first) as inputs:
                return self._compile_baselines(self._baselines, inputs)
        except MtmcError as error:
            self._error = error
            return False

    def _compile_baselines(self, names: Sequence[str], inputs: str = "") -> bool:
        """Compile the user's code; returns whether the process survived it.

        The process locks the GPU itself, only while it computes there.
        """
        gpu = self._pool.gpu
        request = BaselinesRequest(self._capture, self._user_source, tuple(names), inputs, gpu, lock_folder(gpu))
        try:
            self._pool.call_locking(self._process, request, WAIT_FACTOR * self._seconds)
        except MtmcError as error:
            self._error = error
            return False
        return True

    @property
    def has_baselines(self) -> bool:
        """Whether the baselines are compiled, so that a timing against them need not wait."""
        preparation = self._preparation
        if preparation is None or self._is_lost or not preparation.done() or preparation.cancelled():
            return False
        return preparation.result()

    def wait_for_baselines(self, seconds: float | None = None) -> None:
        """Wait for the preparation, at most some seconds. It needs the shared GPU lock, so hold no exclusive one."""
        if self._preparation is not None:
            with contextlib.suppress(CancelledError, TimeoutError):
                self._preparation.exception(seconds)

    def time_trial(self, candidate: CandidateSource, *, previous: str | None = None) -> Timing:
        """Time a candidate against eager mode, the previous version, and the baselines if they are compiled.

        Raises:
            ResultsDiffer: the results differ from those of the user's code.
            MeasurementRejected: the timing cannot be true.
            GpuInUse: another program used the GPU.
        """
        request = self._request(candidate, previous, self._baselines if self.has_baselines else ())
        request = replace(request, seconds=TRIAL_SAMPLING_SECONDS, ends_when_clear=True)
        timing = self._time(request, self._process if self.has_baselines else self._trials)
        ratio = timing.against("eager")
        if ratio is not None and ratio.low >= FAR_FASTER:
            self._far_faster[candidate.text] = timing
        return timing

    def time(
        self,
        candidate: CandidateSource,
        *,
        previous: str | None = None,
        more_baselines: tuple[str, ...] = (),
        wait: float | None = None,
    ) -> Timing:
        """Time a candidate against eager mode, the baselines and the previous version, or return the cached timing.

        Args:
            previous: the file with the previous version.
            more_baselines: further baselines for this candidate.
            wait: how many seconds to wait for the baselines; by default until they are compiled. A baseline that is not is
                part of the timing with a note.

        Raises:
            MeasurementRejected: the timing cannot be true: results change while timed, clocks disagree, or the call is
                faster than the memory.
            GpuInUse: another program used the GPU.
        """
        self.wait_for_baselines(wait)
        if self._preparation is not None and not self.has_baselines and self._trials is not self._process:
            # A loop of launches takes a second, and another timing of it would show the same.
            trial = self._far_faster.get(candidate.text)
            timing = trial or self._time(self._request(candidate, previous, ()), self._trials)
            return replace(timing, baselines=(*timing.baselines, *self.untimed_baselines()))
        missing = [name for name in more_baselines if name not in self._more]
        if missing and self._compile_baselines(missing):
            self._more.update(missing)
        return self._time(self._request(candidate, previous, (*self._baselines, *more_baselines)), self._process)

    def untimed_baselines(self) -> tuple[BaselineTime, ...]:
        """The baselines, each with a note that says why it has no time; none if their preparation never began."""
        if self._preparation is None:
            return ()
        return tuple(BaselineTime(name, 0.0, None, note=self._why_missing()) for name in self._baselines)

    def _why_missing(self) -> str:
        if self._left_out:
            return self._left_out
        if self.has_baselines:
            return "torch.compile was not timed within the budget"
        is_cut = self._error is not None and self._error.kind is FailureKind.DEADLINE
        if self._preparation is not None and self._preparation.done() and not is_cut:
            return f"torch.compile gave no result: {self._error.message if self._error else 'its process ended'}"
        return f"torch.compile was still compiling after {time.monotonic() - self._preparing_since:.0f} s"

    def _request(self, candidate: CandidateSource, previous: str | None, baselines: tuple[str, ...]) -> TimeRequest:
        return TimeRequest(
            self._capture,
            user_source=self._user_source,
            source=candidate.text,
            baselines=baselines,
            bound_us=bound_us(self._capture, self.device()),
            least_us=least_us(self._capture, self.device()),
            previous=previous,
            separate=candidate.separate,
            seconds=SAMPLING_SECONDS,
        )

    def _time(self, request: TimeRequest, process: CandidateProcess) -> Timing:
        if process not in self._timekeepers:
            cache = TimingCache(cache_folder(), self._fresh)

            def ask(request: TimeRequest, is_locked: bool) -> TimeAnswer:
                return self._call(request, process, shares_gpu=not is_locked)

            def prepare(request: TimeRequest) -> None:
                if request.separate is None:
                    versions = (request.source, request.previous) if request.previous else (request.source,)
                    self._prepare(versions, process)

            self._timekeepers[process] = Timekeeper(ask, self._pool.gpu, cache=cache, prepare=prepare)
        return self._timekeepers[process].time(request)

    def recompilations(self, sizes: Sequence[Mapping[str, int]]) -> RecompilationsAnswer:
        """How often ``torch.compile`` compiles the user's code again for these sizes, and how long that takes.

        Raises:
            MtmcError: it cannot be measured.
        """
        request = RecompilationsRequest(self._capture, self._user_source, tuple(sizes))
        return self._call(request, self._process, shares_gpu=True)

    def rank(self, sources: Sequence[str], seconds: float | None) -> list[float | None]:
        """Median microseconds of variants by a few samples each; ``None`` for those that fail or exceed the time limit."""
        self._prepare(sources, self._trials)
        request = RankRequest(self._capture, self._user_source, tuple(sources), seconds)
        answer = self._call(request, self._trials, shares_gpu=True)
        lock_seconds[WAITING_ALONE] += answer.waited_seconds
        lock_seconds[USING_ALONE] += answer.alone_seconds
        return list(answer.medians_us)

    def siblings(self, previous: str | None, groups: Sequence[Sequence[str]]) -> list[list[SiblingTime]]:
        """Compare versions with the version that they change, all of them in one lock period.

        Args:
            previous: the file with the version before; ``None`` for the user's code.
            groups: the files with the versions; of a group of several, only the fastest are sampled often.
        """
        sources = [source for group in groups for source in group]
        self._prepare([*([previous] if previous is not None else []), *sources], self._trials)
        request = SiblingsRequest(
            self._capture,
            self._user_source,
            previous,
            tuple(sources),
            tuple(number for number, group in enumerate(groups) for _ in group),
            bound_us=bound_us(self._capture, self.device()),
            least_us=least_us(self._capture, self.device()),
        )
        answer = self._call(request, self._trials, shares_gpu=True)
        lock_seconds[WAITING_ALONE] += answer.waited_seconds
        lock_seconds[USING_ALONE] += answer.alone_seconds
        times = iter(answer.times)
        return [[next(times) for _ in group] for group in groups]

    def _prepare(self, sources: Sequence[str], process: CandidateProcess) -> None:
        """Load versions, and call them while others use the GPU too, so that it is locked only for samples."""
        self._call(LoadRequest(self._capture, self._user_source, (None, *sources)), process)
        request = PrepareRequest(self._capture, self._user_source, tuple(sources))
        self._call(request, process, shares_gpu=True)

    def _call(self, request: Request[Answer], process: CandidateProcess, *, shares_gpu: bool = False) -> Answer:
        call = self._pool.call if shares_gpu else self._pool.call_unlocked
        try:
            return call(process, request, self._seconds)
        except MtmcError as error:
            if error.kind.is_gpu_failure:
                # A failed kernel makes every later GPU call of the process fail.
                process.next()
                self._is_lost |= process is self._process is not self._trials
            raise
