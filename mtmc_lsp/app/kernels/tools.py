"""What the optimiser of kernels needs of the processes that run the user's code: the session, and the GPU if there is one."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from mtmc_lsp.app.kernels.session import COMPILE_SECONDS, START_SECONDS, TRACE_SECONDS, KernelSession
from mtmc_lsp.capture.module_paths import module_name
from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, GpuInUse, MeasurementRejected, MtmcError, WorkerFailed
from mtmc_lsp.core.results import CompileReport, Timing, Verdict
from mtmc_lsp.core.workload import Environment, Workload, WorkloadSource
from mtmc_lsp.device.calibration_cache import cached_device, remember_device
from mtmc_lsp.device.choice import calibrated_model, planning_model
from mtmc_lsp.kernels.comparison import runs_on_a_case
from mtmc_lsp.kernels.messages import NOT_RUN, CaseTrace, Configs, KernelTimeRequest, TraceCase
from mtmc_lsp.kernels.moved import moved_trace
from mtmc_lsp.kernels.sizes import elements_of
from mtmc_lsp.process.cache_files import cache_folder
from mtmc_lsp.process.gpu_lock import alone, lock_folder
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.protocol import GpuLock
from mtmc_lsp.timing.messages import SAMPLING_SECONDS, CalibrationRequest, EnvironmentRequest, TimeAnswer
from mtmc_lsp.timing.timekeeper import TIME_SECONDS, Timekeeper, TimingCache

MOST_PROGRAMS = 256
"""Program instances of each grid that run on the workload's sizes; the others are taken to do the same on average."""
MOST_BYTES = 16e9
"""Larger workloads are observed at reduced sizes."""
INTERPRETER_SECONDS = 6.0
"""Time for the interpreter on the file as it stands, where a GPU can observe it otherwise."""
INTERPRETER_SHARE, LEAST_SECONDS = 0.15, 1.0
"""Share of a run's time that all interpreter calls may take, and the seconds that each call gets even if the share is spent."""
QUICK_SECONDS = 3.0
"""Where the interpreter takes longer for the file as it stands, only the GPU observes its versions."""
CHECK_SECONDS = 60.0
MOST_CHECKED = 2
"""Cases that run on the GPU: each may compile all configurations again."""
BASELINE_SECONDS = 0.1
"""Time for samples of the file as it stands before any edit."""
MOST_ATTEMPTS = 3
"""Timings that another program disturbs are repeated."""


class KernelTools:
    """Observes, compiles, verifies and times versions of one file."""

    def __init__(
        self,
        session: KernelSession,
        *,
        fresh: bool = False,
        sampling: float = SAMPLING_SECONDS,
        seconds: float = math.inf,
    ) -> None:
        """Prepare.

        Args:
            fresh: whether cached timings are measured again.
            sampling: seconds for the samples of one timing.
            seconds: time of the whole run.
        """
        self._session, self._fresh, self._sampling_seconds = session, fresh, sampling
        self._interpreter_seconds = INTERPRETER_SHARE * seconds
        """Time that is left for the interpreter where a GPU can observe the kernels otherwise."""
        self.is_interpreted = True
        """Whether the interpreter observed the file as it stands; otherwise only the GPU did."""
        self.interprets_versions = True
        """Whether the interpreter also observes versions."""
        self.times_test = False
        """Whether the observed workload is timed, because the kernels do not run on the other one."""
        self._has_zero_indices = False
        """Whether checks on the GPU fill new integer tensors with zero."""
        self._times_workload = False
        """Whether a version was timed on the inputs of the workload, so that the kernels run on them."""
        self.compile_seconds = 0.0
        """Time to compile the kernels of the file as it stands for the test, where it ran on the GPU."""
        self.gpu_problem = ""
        """Why the file as it stands runs on no case on the GPU."""
        self._observed: dict[bytes, CaseTrace | None] = {}
        self._timekeeper: Timekeeper[KernelTimeRequest] | None = None
        self._works: dict[bytes, CaseTrace | None] = {}
        self._can_sample = session.target.workload.source is not WorkloadSource.SCRIPT
        self._compiled: dict[tuple[bytes, tuple[str, ...]], CompileReport] = {}

    @cached_property
    def environment(self) -> Environment:
        """The machine and the versions."""
        with self._session.spent("start"):
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
                # Another run may have measured it meanwhile.
                device = cached_device(self.environment)
                if device is None:
                    request = CalibrationRequest()
                    device = calibrated_model(
                        self.environment, self._session.plain_worker().call(request, TIME_SECONDS)
                    )
                    remember_device(self.environment, device)
        return device

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures that kernels are compiled for."""
        archs = self._session.target.opened.settings.archs
        return (self.environment.capability,) if self.has_gpu else archs[:1]

    def observe(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        """Observe a text on cases, and compare its results with those of the file as it stands.

        With a GPU, versions run on it, too. What takes the interpreter too long is observed on the GPU alone.
        """
        traces = self._original(cases) if text == self._session.target.opened.text else self._version(text, cases)
        if self._session.target.observed_workload.source is WorkloadSource.SCRIPT:
            # Its only case is the workload.
            self._observed[text] = traces[0] if traces and traces[0].launches else None
        return traces

    def observe_configurations(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        """Compare the results of the other configurations of a text's autotuners on the GPU."""
        return self._checked(text, cases, configs=Configs.OTHERS)

    def _original(self, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        """Observe the file as it stands; with a GPU, it runs there meanwhile."""
        text = self._session.target.opened.text
        if not self.has_gpu:
            return self._session.trace(text, cases, compares_faulty=True)
        with ThreadPoolExecutor(1) as pool:
            interpreting = pool.submit(self._interpreted, text, cases)
            checked = self._checked_original(text, cases)
            traces, seconds = interpreting.result()
        if checked and not runs_on_a_case(checked):
            self.gpu_problem = next((fault.detail for trace in checked for fault in trace.faults), checked[0].refusal)
        is_observed = runs_on_a_case(traces)
        self.interprets_versions = is_observed and seconds < QUICK_SECONDS
        if is_observed:
            return traces
        self.is_interpreted = not any(not trace.refusal and not trace.faults for trace in checked)
        return checked if not self.is_interpreted else traces or checked

    def _checked_original(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        """Run the file as it stands on the GPU; nothing if its process ends."""
        try:
            return self._checked(text, cases)
        except MtmcError as error:
            if error.kind is FailureKind.CANCELLED:
                # The time of the run ended.
                raise
            if not _is_lost(error):
                return ()
        # The test may use integers as indices that nothing has written: the largest ones point outside the memory.
        self._has_zero_indices = True
        try:
            return self._checked(text, cases)
        except MtmcError:
            self._has_zero_indices = False
            return ()

    def _interpreted(self, text: bytes, cases: Sequence[TraceCase]) -> tuple[Sequence[CaseTrace], float]:
        """What the interpreter observes of the file as it stands, nothing if it takes too long, and the seconds."""
        self._session.start_interpreter()
        began = time.monotonic()
        try:
            traces = self._session.trace(text, cases, compares_faulty=True, seconds=self._interpreter_limit)
        except WorkerFailed:
            traces = ()
        seconds = time.monotonic() - began
        self._interpreter_seconds -= seconds
        return traces, seconds

    @property
    def _interpreter_limit(self) -> float:
        """The time limit of the next call."""
        return max(LEAST_SECONDS, min(INTERPRETER_SECONDS, self._interpreter_seconds))

    def _version(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        """Observe a version; with a GPU, it runs there first."""
        checked = self._checked(text, cases) if self.has_gpu else ()
        if any(trace.faults for trace in checked) or (self.has_gpu and not self.interprets_versions):
            return checked
        traces = self._session.trace(text, cases, compares_faulty=True)
        if not traces and checked:
            # The interpreter does not end in time.
            return checked
        return traces

    def _checked(
        self, text: bytes, cases: Sequence[TraceCase], configs: Configs = Configs.FIRST
    ) -> Sequence[CaseTrace]:
        """Run a text on the GPU, on some of the cases; the others are refused."""
        chosen = {id(case) for case in [*cases[-1:], *cases[: MOST_CHECKED - 1]]}
        lock = GpuLock(self._gpu, lock_folder(self._gpu)) if self._gpu else None
        with self._fresh_after_loss():
            answer = self._session.check(
                text,
                [case for case in cases if id(case) in chosen],
                lock,
                CHECK_SECONDS,
                configs,
                has_zero_indices=self._has_zero_indices,
            )
        if text == self._session.target.opened.text:
            self.compile_seconds = max(self.compile_seconds, answer.compile_seconds)
        found = iter(answer.cases)
        return [
            next(found, CaseTrace(case, refusal=answer.problem or NOT_RUN))
            if id(case) in chosen
            else CaseTrace(case, refusal=NOT_RUN)
            for case in cases
        ]

    @contextlib.contextmanager
    def _fresh_after_loss(self) -> Iterator[None]:
        """After an error of the GPU, its process cannot use the GPU any more: a new one follows."""
        try:
            yield
        except MtmcError as error:
            if _is_lost(error):
                self._session.plain_worker().close()
            raise

    def work(self, text: bytes) -> CaseTrace | None:
        """Observe a text on the workload's sizes; a sample of the programs if there are many."""
        if text not in self._works:
            known = ((before, trace) for before, trace in self._works.items() if trace is not None)
            moved = (moved_trace(trace, before, text) for before, trace in known)
            self._works[text] = next(filter(None, moved), None) or self._work(text)
        return self._works[text]

    def _work(self, text: bytes) -> CaseTrace | None:
        is_driven = self._session.target.observed_workload.source is WorkloadSource.SCRIPT
        trace = self._sampled(text) if self._can_sample else None
        if trace is None and is_driven:
            # The workload takes the interpreter too long, or is the test itself.
            self._can_sample &= text != self._session.target.opened.text
            if text in self._observed:
                return self._observed[text]
            traces = self._session.trace(text, [TraceCase({})], compares_faulty=True)
            trace = traces[0] if traces and traces[0].launches else None
        return trace

    def _sampled(self, text: bytes) -> CaseTrace | None:
        target = self._session.target
        workload, sizes = target.workload, dict(target.workload.sizes)
        is_large = 4 * elements_of(workload, sizes) > MOST_BYTES
        cases = self._session.cases() if is_large else [TraceCase(sizes)]
        try:
            seconds = self._interpreter_limit if self.has_gpu and target.observed is not None else TRACE_SECONDS
            most = 0 if is_large else MOST_PROGRAMS
            traces = self._session.trace(text, cases[-1:], most_programs=most, seconds=seconds)
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
        return self._timed(text, previous, bound_us, least_us, self._sampling_seconds)

    def baseline(self, bound_us: float) -> Timing | None:
        """Time the file as it stands shortly; None without a GPU.

        Raises:
            MtmcError: it cannot be timed.
        """
        text = self._session.target.opened.text
        return self._timed(text, None, bound_us, 0.0, BASELINE_SECONDS) if self.has_gpu else None

    @contextlib.contextmanager
    def timing_test(self) -> Iterator[None]:
        """Time the launches of the file's test meanwhile, and not the calls with the largest inputs."""
        self.times_test = True
        try:
            yield
        finally:
            self.times_test = False

    # Parts -----------------------------------------------------------------------------------------------------------

    def _timed(self, text: bytes, previous: bytes | None, bound_us: float, least_us: float, seconds: float) -> Timing:
        if self._timekeeper is None:
            self._timekeeper = Timekeeper(self._ask, self._gpu, cache=TimingCache(cache_folder(), self._fresh))
        target = self._session.target
        if self.times_test:
            # The bound is that of the workload, if that could be sampled.
            bound_us = 0.0 if self._can_sample else bound_us
            return self._timing(target.observed_workload, text, previous, bound_us, 0.0, seconds)
        try:
            timing = self._timing(target.workload, text, previous, bound_us, least_us, seconds)
            self._times_workload = True
            return timing
        except (GpuInUse, MeasurementRejected):
            raise
        except MtmcError as error:
            is_tried = previous is not None or self._times_workload
            if target.observed is None or is_tried or error.kind is FailureKind.CANCELLED:
                raise
            if text != target.opened.text and self._runs_on_workload(bound_us):
                raise
            # The kernels may not accept the generated inputs.
            timing = self._timing(target.observed, text, previous, bound_us, 0.0, seconds)
            self.times_test = True
            return timing

    def _runs_on_workload(self, bound_us: float) -> bool:
        """Whether the file as it stands runs on the inputs of the workload, so that a version alone fails there."""
        target = self._session.target
        try:
            self._timing(target.workload, target.opened.text, None, bound_us, 0.0, BASELINE_SECONDS)
        except MtmcError:
            return False
        self._times_workload = True
        return True

    def _timing(
        self,
        workload: Workload,
        text: bytes,
        previous: bytes | None,
        bound_us: float,
        least_us: float,
        seconds: float,
    ) -> Timing:
        assert self._timekeeper is not None
        importable = self._session.importable
        request = KernelTimeRequest(
            workload,
            importable(self._session.target.opened.text),
            importable(text),
            importable(previous) if previous is not None else "",
            bound_us,
            least_us,
            seconds,
        )
        for attempt in range(MOST_ATTEMPTS):
            try:
                with self._fresh_after_loss(), self._session.spent("time"):
                    return self._timekeeper.time(request)
            except GpuInUse:
                if attempt == MOST_ATTEMPTS - 1:
                    raise
        raise AssertionError

    @cached_property
    def _gpu(self) -> str:
        """UUID of the GPU."""
        gpu = self._session.plain_worker().call(StartRequest(gpu=True), START_SECONDS).gpu
        lock_folder(gpu)
        return gpu

    def _ask(self, request: KernelTimeRequest, is_locked: bool) -> TimeAnswer:
        lock = None if is_locked or not self._gpu else GpuLock(self._gpu, lock_folder(self._gpu))
        answer = self._session.plain_worker().call(request, TIME_SECONDS, lock)
        began, ended = answer.window
        # Parts of the time that timings take.
        self._session.seconds["wait for the GPU"] += answer.waited_seconds
        self._session.seconds["GPU alone"] += ended - began
        return answer


def _is_lost(error: MtmcError) -> bool:
    """Whether a process cannot use the GPU any more after an error."""
    return "CUDA" in str(error) or "Accelerator" in str(error)
