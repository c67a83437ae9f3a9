"""What the optimiser of kernels needs of the processes that run the user's code: the session, and the GPU if there is one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from mtmc_lsp.app.kernels.session import COMPILE_SECONDS, KernelSession
from mtmc_lsp.capture.module_paths import module_name
from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.results import CompileReport, Timing, Verdict
from mtmc_lsp.core.workload import Environment, WorkloadSource
from mtmc_lsp.device.calibration_cache import cached_device, remember_device
from mtmc_lsp.device.choice import calibrated_model, planning_model
from mtmc_lsp.kernels.messages import CaseTrace, KernelTimeRequest, TraceCase
from mtmc_lsp.kernels.sizes import elements_of
from mtmc_lsp.process.cache_files import cache_folder
from mtmc_lsp.process.gpu_lock import alone, lock_folder
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.protocol import GpuLock
from mtmc_lsp.timing.messages import CalibrationRequest, EnvironmentRequest, TimeAnswer
from mtmc_lsp.timing.timekeeper import TIME_SECONDS, Timekeeper, TimingCache

MOST_PROGRAMS = 256
"""Program instances of each grid that run on the workload's sizes; the others are taken to do the same on average."""
MOST_BYTES = 16e9
"""Larger workloads are observed at reduced sizes."""
START_SECONDS = 120.0


class KernelTools:
    """Observes, compiles, verifies and times versions of one file."""

    def __init__(self, session: KernelSession, *, fresh: bool = False) -> None:
        self._session, self._fresh = session, fresh
        self._timekeeper: Timekeeper[KernelTimeRequest] | None = None
        self._works: dict[bytes, CaseTrace | None] = {}
        self._can_sample = session.target.workload.source is not WorkloadSource.SCRIPT
        self._compiled: dict[tuple[bytes, tuple[str, ...]], CompileReport] = {}

    @cached_property
    def environment(self) -> Environment:
        """The machine and the versions."""
        return self._session.plain_worker().call(EnvironmentRequest(), START_SECONDS)

    @property
    def has_gpu(self) -> bool:
        """Whether versions are timed."""
        return bool(self.environment.gpu)

    @property
    def triton(self) -> tuple[int, ...]:
        """Version of Triton, as (3, 4)."""
        return tuple(int(part) for part in re.findall(r"\d+", self.environment.triton)[:2])

    @cached_property
    def device(self) -> DeviceModel:
        """The calibrated GPU of this machine; without one, that of the settings by its data sheet."""
        if not self.has_gpu:
            return planning_model(self._session.target.opened.settings.archs)
        device = cached_device(self.environment)
        if device is None:
            with alone(self._gpu):
                device = calibrated_model(
                    self.environment, self._session.plain_worker().call(CalibrationRequest(), TIME_SECONDS)
                )
            remember_device(self.environment, device)
        return device

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures that kernels are compiled for."""
        archs = self._session.target.opened.settings.archs
        return (self.environment.capability,) if self.has_gpu else archs[:1]

    def observe(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        """Observe a text on cases, and compare its results with those of the file as it stands."""
        traces = self._session.trace(text, cases, compares_faulty=True)
        if self._session.target.workload.source is WorkloadSource.SCRIPT:
            # Its only case is the workload.
            self._works[text] = traces[0] if traces and traces[0].launches else None
        return traces

    def work(self, text: bytes) -> CaseTrace | None:
        """Observe a text on the workload's sizes; a sample of the programs if there are many."""
        if text not in self._works:
            self._works[text] = self._work(text)
        return self._works[text]

    def _work(self, text: bytes) -> CaseTrace | None:
        is_driven = self._session.target.observed_workload.source is WorkloadSource.SCRIPT
        trace = self._sampled(text) if self._can_sample else None
        if trace is None and is_driven:
            # The workload takes the interpreter too long, or is the test itself.
            self._can_sample &= text != self._session.target.opened.text
            traces = self._session.trace(text, [TraceCase({})], compares_faulty=True)
            trace = traces[0] if traces and traces[0].launches else None
        return trace

    def _sampled(self, text: bytes) -> CaseTrace | None:
        target = self._session.target
        workload, sizes = target.workload, dict(target.workload.sizes)
        is_large = 4 * elements_of(workload, sizes) > MOST_BYTES
        cases = self._session.cases() if is_large else [TraceCase(sizes)]
        try:
            traces = self._session.trace(text, cases[-1:], most_programs=0 if is_large else MOST_PROGRAMS)
        except MtmcError:
            if target.observed is None:
                raise
            return None
        return traces[0] if traces and traces[0].launches else None

    def compiled(self, text: bytes, trace: CaseTrace) -> CompileReport:
        """Cross-compile the launches of a trace."""
        opened = self._session.target.opened
        launches = tuple({repr(work.launch): work.launch for work in trace.launches}.values())
        key = (text, tuple(map(repr, launches)))
        if key not in self._compiled:
            request = CompileRequest(
                str(opened.path), module_name(opened.path), text.decode(), launches, self.archs, COMPILE_SECONDS
            )
            self._compiled[key] = self._session.compile(request)
        return self._compiled[key]

    def verify(self, text: bytes) -> Verdict | None:
        """Compare a text with the reference; None without one."""
        return self._session.verify(text) if self._session.target.reference is not None else None

    def time(self, text: bytes, previous: bytes | None, bound_us: float, least_us: float) -> Timing | None:
        """Time a text against the file as it stands and the version before; None without a GPU.

        Raises:
            MeasurementRejected: the timing is not plausible.
            GpuInUse: another program used the GPU.
        """
        if not self.has_gpu:
            return None
        if self._timekeeper is None:
            self._timekeeper = Timekeeper(self._ask, self._gpu, cache=TimingCache(cache_folder(), self._fresh))
        importable = self._session.importable
        request = KernelTimeRequest(
            self._session.target.workload,
            importable(self._session.target.opened.text),
            importable(text),
            importable(previous) if previous is not None else "",
            bound_us,
            least_us,
        )
        return self._timekeeper.time(request)

    # Parts -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _gpu(self) -> str:
        """UUID of the GPU."""
        gpu = self._session.plain_worker().call(StartRequest(gpu=True), START_SECONDS).gpu
        lock_folder(gpu)
        return gpu

    def _ask(self, request: KernelTimeRequest, is_locked: bool) -> TimeAnswer:
        lock = None if is_locked or not self._gpu else GpuLock(self._gpu, lock_folder(self._gpu))
        return self._session.plain_worker().call(request, TIME_SECONDS, lock)
