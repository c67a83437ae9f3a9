"""Times candidates on the GPU, in one sandboxed process: versions of the user's file and foreign candidates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import CancelledError, Executor, Future

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.results import Timing
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.calibration_cache import cached_device, remember_device
from mtmc_lsp.device.choice import calibrated_model
from mtmc_lsp.process.cache_files import cache_folder
from mtmc_lsp.process.gpu_lock import lock_folder
from mtmc_lsp.process.protocol import Answer, Request
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.timing.bounds import bound_us, least_us
from mtmc_lsp.timing.messages import BaselinesRequest, CalibrationRequest, RankRequest, TimeRequest
from mtmc_lsp.timing.timekeeper import TIME_SECONDS, Timekeeper, TimingCache
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.messages import CandidateSource
from mtmc_lsp.verify.reference import PreparedCase, Reference

WAIT_FACTOR = 4
"""Factor on the time limit of a command that waits for the GPU lock itself."""


class Timer:
    """Times candidates of one capture against its baselines."""

    def __init__(
        self,
        capture: Capture,
        user_source: str | None,
        pool: WorkerPool,
        process: CandidateProcess,
        *,
        baselines: tuple[str, ...] = ("compile",),
        fresh: bool = False,
        seconds: float = TIME_SECONDS,
    ) -> None:
        """Prepare without timing.

        Args:
            user_source: the user's file; ``None`` reads the file.
            process: times; no verification runs in it.
            baselines: modes of ``torch.compile`` to time besides eager mode: ``compile``, ``max-autotune``.
            fresh: whether to ignore cached timings.
            seconds: time limit for one candidate, including the preparation of the baselines.
        """
        self._capture, self._user_source, self._pool, self._process = capture, user_source, pool, process
        self._baselines, self._fresh, self._seconds = baselines, fresh, seconds
        self._preparation: Future[None] | None = None
        self._device: DeviceModel | None = None
        self._timekeeper: Timekeeper | None = None

    def device(self) -> DeviceModel:
        """The calibrated model of the GPU; measured once per machine."""
        if self._device is None:
            environment = self._capture.environment
            self._device = cached_device(environment)
            if self._device is None:
                self._device = calibrated_model(environment, self.call_exclusive(CalibrationRequest()))
                remember_device(environment, self._device)
        return self._device

    def prepare_baselines(self, background: Executor, reference: Reference, first: PreparedCase) -> None:
        """Compile the baselines in the background; only the first call does.

        Args:
            background: runs the preparation.
            reference: shares the workload's inputs if they are large.
            first: the case that is the workload itself.
        """
        if self._preparation is None:
            self._preparation = background.submit(self._prepare_baselines, reference, first)

    def _prepare_baselines(self, reference: Reference, first: PreparedCase) -> None:
        with contextlib.suppress(MtmcError), reference.sharing_workload(first) as inputs:
            self._compile_baselines(self._baselines, inputs)

    def _compile_baselines(self, names: Sequence[str], inputs: str = "") -> None:
        """Compile the user's code; the process locks the GPU itself, only while it computes there."""
        gpu = self._pool.gpu
        request = BaselinesRequest(self._capture, self._user_source, tuple(names), inputs, gpu, lock_folder(gpu))
        # The first timing repeats a failure and reports it.
        with contextlib.suppress(MtmcError):
            self._pool.call_unlocked(self._process, request, WAIT_FACTOR * self._seconds)

    def wait_for_baselines(self) -> None:
        """Wait for the preparation. It needs the shared GPU lock, so a caller that holds the exclusive one would deadlock."""
        if self._preparation is not None:
            with contextlib.suppress(CancelledError):
                self._preparation.exception()

    def time(
        self, candidate: CandidateSource, *, previous: str | None = None, more_baselines: tuple[str, ...] = ()
    ) -> Timing:
        """Time a candidate against eager mode, the baselines and the previous version, or return the cached timing.

        Args:
            previous: the file with the previous version.
            more_baselines: further baselines for this candidate.

        Raises:
            MeasurementRejected: the timing cannot be true: results change while timed, clocks disagree, or the call is
                faster than the memory.
            GpuInUse: another program used the GPU.
        """
        request = TimeRequest(
            self._capture,
            user_source=self._user_source,
            source=candidate.text,
            baselines=(*self._baselines, *more_baselines),
            bound_us=bound_us(self._capture, self.device()),
            least_us=least_us(self._capture, self.device()),
            previous=previous,
            separate=candidate.separate,
        )
        if self._timekeeper is None:
            cache = TimingCache(cache_folder(), self._fresh)
            self._timekeeper = Timekeeper(self._call, self._pool.gpu, cache=cache, before=self._before_timing)
        return self._timekeeper.time(request)

    def rank(self, sources: Sequence[str], seconds: float | None) -> list[float | None]:
        """Median microseconds of variants by a few samples each; ``None`` for those that fail or exceed the time limit."""
        request = RankRequest(self._capture, self._user_source, tuple(sources), seconds)
        return list(self.call_exclusive(request).medians_us)

    def call_exclusive(self, request: Request[Answer]) -> Answer:
        """The answer to a request that needs the GPU exclusively."""
        self.wait_for_baselines()
        with self._pool.exclusive_gpu():
            return self._call(request)

    def _before_timing(self, request: TimeRequest) -> None:
        self.wait_for_baselines()
        missing = [name for name in request.baselines if name not in self._baselines]
        if missing:
            self._compile_baselines(missing)

    def _call(self, request: Request[Answer]) -> Answer:
        try:
            return self._pool.call_unlocked(self._process, request, self._seconds)
        except MtmcError as error:
            if error.kind.is_gpu_failure:
                # A failed kernel makes every later GPU call of the process fail.
                self._process.next()
            raise
