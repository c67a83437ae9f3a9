"""Checks and times candidates in worker processes on this machine."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.results import Check, CompileReport, KernelReport, Timing, Verdict
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.calibration_cache import cached_device, remember_device
from mtmc_lsp.device.choice import calibrated_model, planning_model
from mtmc_lsp.process.cache_files import cache_folder
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.gpu_lock import alone, lock_folder, shared
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.protocol import Answer, Request
from mtmc_lsp.process.sandbox import Isolation
from mtmc_lsp.process.worker_process import Sandbox, Worker
from mtmc_lsp.timing.bounds import bound_us, least_us
from mtmc_lsp.timing.messages import BaselinesRequest, CalibrationRequest, ProfileRequest, RankRequest, TimeRequest
from mtmc_lsp.timing.timekeeper import TIME_SECONDS, Timekeeper, TimingCache
from mtmc_lsp.verify.candidate_process import RUN_SECONDS, CandidateProcess
from mtmc_lsp.verify.observations import launcher_calls
from mtmc_lsp.verify.verification import Verification

Result = TypeVar("Result")

COMPILE_SECONDS = 180.0
WAITING = 4
"""How many times as long a command may take that waits for the GPU itself."""
WATCH_SECONDS = 1.0
"""How long a version is watched for its kernels, about."""


class LocalMeasurer:
    """A :class:`~mtmc_lsp.core.protocols.Measurer` on this machine: on its GPU, else by Triton's interpreter."""

    def __init__(
        self,
        capture: Capture,
        python: str,
        *,
        source: str | None = None,
        archs: tuple[str, ...] = ("sm_80", "sm_90", "gfx942"),
        seed: int | None = None,
        precision: str = "budget",
        run_seconds: float = RUN_SECONDS,
        compile_seconds: float = COMPILE_SECONDS,
        time_seconds: float = TIME_SECONDS,
        deadline: float | None = None,
        baselines: tuple[str, ...] = ("compile",),
        fresh: bool = False,
        needs_sandbox: bool = False,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Prepare the workers; they start when first used.

        Args:
            capture: what is measured.
            python: the user's interpreter.
            source: the user's own text, where it is not what the file holds now.
            archs: what to cross-compile for.
            seed: of the verification inputs; by default one that no candidate can know.
            precision: ``budget`` or ``strict``, as in the settings.
            run_seconds: limit for one case of one candidate.
            compile_seconds: limit for compiling one candidate.
            time_seconds: limit for timing one candidate, the baselines' preparation included.
            deadline: of the monotonic clock, after which nothing goes on.
            baselines: what is timed beside eager: ``compile``, ``max-autotune``.
            fresh: whether what was timed before is timed again.
            needs_sandbox: whether to refuse to run candidates that cannot be locked in completely.
            template: what the workers become copies of, where its variables are theirs; the caller closes it.
        """
        self._capture = capture
        self._own = source
        self._archs = archs
        self._deadline, self._baselines, self._fresh = deadline, baselines, fresh
        self._run_seconds, self._compile_seconds, self._time_seconds = run_seconds, compile_seconds, time_seconds
        self.has_gpu = bool(capture.environment.gpu) and capture.workload.device == "cuda"
        cwd = str(project_root(Path(capture.workload.target.path)))
        environment = {} if self.has_gpu else {"TRITON_INTERPRET": "1"}
        usable = fork_server is not None and dict(fork_server.env) == environment
        # Closed at the end where it is ours.
        self._fork_server = None if usable else ForkServer(python, environment, preload=True)
        fork_server = fork_server if usable else self._fork_server
        # Two folders: the candidate's process may read inputs, never what is expected, and writes to neither.
        self._secret = Path(tempfile.mkdtemp(prefix="mtmc-expected-"))
        self._inputs = Path(tempfile.mkdtemp(prefix="mtmc-inputs-"))
        self._kernels = tempfile.mkdtemp(prefix="mtmc-kernels-")
        self._reference = Worker(python, cwd=cwd, env=environment, fork_server=fork_server)
        # Whatever runs a candidate's code is locked in.
        self._runner, self._timer = (
            CandidateProcess(
                python,
                cwd,
                capture.environment,
                has_gpu=self.has_gpu,
                hidden=str(self._secret),
                fork_server=fork_server,
                needs_sandbox=needs_sandbox,
                kernels=self._kernels,
            )
            for _ in range(2)
        )
        locked = Sandbox((self._kernels,), str(self._secret), programs=True)
        # The second compiles what other sizes need: nobody waits for it, and it lets others have the cores first.
        self._compiler, self._ahead = (
            Worker(
                python,
                cwd=cwd,
                env={"TRITON_CACHE_DIR": self._kernels},
                sandbox=locked,
                fork_server=fork_server,
                low_priority=low_priority,
            )
            for low_priority in (False, True)
        )
        self._compiling: Future[None] | None = None
        self._background = ThreadPoolExecutor(4)
        self._verification = Verification(
            capture,
            self._call_untyped,
            self._reference,
            self._runner,
            own=source,
            seed=secrets.randbelow(2**31) if seed is None else seed,
            precision=precision,
            has_gpu=self.has_gpu,
            secret=self._secret,
            inputs=self._inputs,
            seconds=run_seconds,
        )
        self._baseline: Future[None] | None = None
        self._is_alone = False
        """Whether the GPU is held alone by this measurer, for what shares it otherwise."""
        self._device: DeviceModel | None = None
        self._timekeeper: Timekeeper | None = None
        if self.has_gpu:
            # Importing torch takes seconds: all processes do it at once, while the first step is planned.
            self._gpu = self._background.submit(self._start, self._timer)
            for worker in (self._reference, self._runner, self._compiler):
                self._background.submit(self._start, worker)

    def isolation(self) -> Isolation:
        """How far candidates are locked in.

        Raises:
            EnvironmentNotAble: less than is asked for.
        """
        return self._runner.isolation

    def _start(self, worker: Worker | CandidateProcess) -> str:
        """Let a worker import torch; gives the UUID of its GPU."""
        try:
            if isinstance(worker, CandidateProcess):
                worker.start()
                return worker.gpu
            found = self._limited(worker, StartRequest(gpu=worker is not self._compiler), self._run_seconds)
        except MtmcError:
            # What is wrong with an interpreter is said by the first real request.
            return ""
        return found.gpu

    def _call_untyped(
        self, worker: Worker | CandidateProcess, command: str, request: Mapping[str, object], seconds: float
    ) -> dict[str, Any]:
        """Run a command of ``verify`` in a worker. On a GPU this waits, without a limit, until nothing is timed."""

        def call(limit: float) -> dict[str, Any]:
            return worker.call_untyped(command, request, limit)

        if not self.has_gpu or self._is_alone:
            return self._within_deadline(call, command, seconds)
        with shared(self._gpu.result()):
            return self._within_deadline(call, command, seconds)

    def _limited(self, worker: Worker | CandidateProcess, request: Request[Answer], seconds: float) -> Answer:
        """Run a request in a worker within ``seconds`` and the deadline of the run."""

        def call(limit: float) -> Answer:
            return worker.call(request, limit)

        return self._within_deadline(call, request.command, seconds)

    def _within_deadline(self, call: Callable[[float], Result], command: str, seconds: float) -> Result:
        """Call with a limit of at most ``seconds``.

        Raises:
            WorkerFailed: with kind ``DEADLINE`` if the deadline of the run ended it.
        """
        remaining = seconds if self._deadline is None else self._deadline - time.monotonic()
        expired = WorkerFailed(f"the time for the whole run was up during {command}", kind=FailureKind.DEADLINE)
        if remaining <= 0:
            raise expired
        try:
            return call(min(seconds, remaining))
        except WorkerFailed as error:
            if error.kind is FailureKind.TIMEOUT and remaining < seconds:
                raise expired from None
            raise

    def device(self) -> DeviceModel:
        """The GPU of this machine as calibrated, measured first where it never was; else the model of a data file."""
        if self._device is None:
            self._device = self._calibrated() if self.has_gpu else planning_model(self._archs)
        return self._device

    def _calibrated(self) -> DeviceModel:
        environment = self._capture.environment
        device = cached_device(environment)
        if device is None:
            device = calibrated_model(environment, self._timed_alone(CalibrationRequest()))
            remember_device(environment, device)
        return device

    def close(self) -> None:
        """End the workers and remove their files."""
        self._background.shutdown(wait=False, cancel_futures=True)
        self._verification.end()
        self._stop_compiling()
        for worker in (self._reference, self._runner, self._compiler, self._ahead, self._timer):
            worker.kill()
            worker.close()
        if self._fork_server is not None:
            self._fork_server.close()
        for folder in (self._secret, self._inputs, Path(self._kernels)):
            shutil.rmtree(folder, ignore_errors=True)

    # Verification ------------------------------------------------------------------------------------------------

    def verify(self, candidate: Candidate) -> Verdict:
        """Run the candidate on every case, in a process of its own, and compare with the oracle."""
        self._prepare()
        try:
            return self._verification.verify(candidate)
        finally:
            # Whatever it changed in its process goes with it, a GPU context that a kernel broke too.
            self._runner.next()
            if self.has_gpu:
                self._background.submit(self._runner.warm_up)

    def verify_int32_offsets(self, candidate: Candidate) -> Check:
        """Run a version that was verified once more, where offsets of elements pass 2^31 and the GPU has the memory."""
        if not self.has_gpu:
            return self._verification.verify_int32_offsets(candidate, self._runner.free_bytes)
        self._wait_for_baseline()
        try:
            # It takes most of the memory that is free: others would find none.
            with alone(self._gpu.result()):
                self._is_alone = True
                # Free memory is what is free now; what is timed holds some.
                self._runner.next()
                self._runner.start()
                return self._verification.verify_int32_offsets(candidate, self._runner.free_bytes)
        finally:
            self._is_alone = False
            self._runner.next()

    def _prepare(self) -> None:
        """Let the references and, on a GPU, the compiled baseline be made while the first candidate is compiled."""
        self._verification.begin(self._background)
        if self._baseline is None and self.has_gpu:
            self._baseline = self._background.submit(self._made_baseline)

    def _made_baseline(self) -> None:
        with contextlib.suppress(MtmcError), self._verification.given() as given:
            self._compile_baselines(self._baselines, given)

    def _compile_baselines(self, names: Sequence[str], given: str = "") -> None:
        """Have the user's own code compiled; the timer holds the GPU itself, and only while it computes there."""
        gpu = self._gpu.result()
        request = BaselinesRequest(self._capture, self._own, tuple(names), given, gpu, lock_folder(gpu))
        # What fails here fails again, and is said, when a candidate is timed. It also waits for the GPU, which is in no limit.
        with contextlib.suppress(MtmcError):
            self._limited(self._timer, request, WAITING * self._time_seconds)

    def _wait_for_baseline(self) -> None:
        """Until the timer is free: who held the GPU alone and waited for it would keep it from ending."""
        if self._baseline is not None:
            with contextlib.suppress(CancelledError):
                self._baseline.exception()

    def _before_timing(self, request: TimeRequest) -> None:
        self._wait_for_baseline()
        more = [name for name in request.baselines if name not in self._baselines]
        if more:
            self._compile_baselines(more)

    # Compilation and timing --------------------------------------------------------------------------------------

    def compile(self, candidate: Candidate) -> CompileReport:
        """Cross-compile every kernel for every architecture."""
        self._prepare()
        self._stop_compiling()
        archs = (self._capture.environment.capability,) if self.has_gpu else self._archs
        calls = None
        if candidate.code is not None and not candidate.launches:
            calls = launcher_calls(self._capture.graph, candidate.code, [self._capture.graph.sizes])
        request = CompileRequest(
            path=self._capture.workload.target.path,
            name=self._capture.module_name,
            source=candidate.source,
            launches=candidate.launches,
            archs=archs,
            seconds=self._compile_seconds,
            calls=calls,
        )
        try:
            report = self._limited(self._compiler, request, 2 * self._compile_seconds)
        except WorkerFailed as error:
            if error.kind is FailureKind.DEADLINE:
                raise
            return CompileReport((KernelReport("", archs[0], error=error.message),))
        if self.has_gpu and report.ok and candidate.code is not None:
            others = launcher_calls(self._capture.graph, candidate.code, self._verification.other_sizes)
            self._compiling = self._background.submit(self._compile_more, replace(request, launches=(), calls=others))
        return report

    def _stop_compiling(self) -> None:
        """End what is compiled for the other sizes of an earlier candidate: it was verified, or will not be."""
        while self._compiling is not None and not self._compiling.cancel() and not self._compiling.done():
            self._ahead.kill()
            wait([self._compiling], 0.1)

    def _compile_more(self, request: CompileRequest) -> None:
        """Compile what other sizes need, side by side, while the first case runs: a launch compiles one kernel at a time."""
        with contextlib.suppress(MtmcError):
            self._limited(self._ahead, request, 2 * self._compile_seconds)

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        """Paired timing; None without a GPU.

        Raises:
            MeasurementRejected: the timing cannot be true: other results while timed, clocks that disagree, or faster
                than the memory.
        """
        if not self.has_gpu:
            return None
        self._stop_compiling()
        request = TimeRequest(
            self._capture,
            own=self._own,
            source=candidate.source,
            previous=previous.source if previous is not None and previous.code is not None else None,
            baselines=(*self._baselines, *self._replaying(candidate)),
            bound_us=bound_us(self._capture, self.device()),
            least_us=least_us(self._capture, self.device()),
        )
        if self._timekeeper is None:
            cache = TimingCache(cache_folder(), self._fresh)
            self._timekeeper = Timekeeper(self._timed, self._gpu.result(), cache=cache, before=self._before_timing)
        return self._timekeeper.time(request)

    @staticmethod
    def _replaying(candidate: Candidate) -> tuple[str, ...]:
        """What a version that replays a CUDA graph is compared with as well: the compiler's own."""
        is_replayed = isinstance(candidate.schedule, Mapping) and candidate.schedule.get("replayed")
        return ("reduce-overhead",) if is_replayed else ()

    def quick(self, candidates: Sequence[Candidate], *, seconds: float | None = None) -> list[float | None]:
        """Rank candidates on the GPU: median microseconds each, None for those that fail.

        Args:
            candidates: variants of one version.
            seconds: wall time after which those not yet timed count as failed.

        Raises:
            EnvironmentNotAble: there is no GPU.
        """
        if not self.has_gpu:
            raise EnvironmentNotAble("ranking needs a CUDA GPU")
        sources = tuple(candidate.source for candidate in candidates)
        return list(self._timed_alone(RankRequest(self._capture, self._own, sources, seconds)).medians_us)

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        """The kernels of one call as torch's profiler sees them on the GPU, the slowest first; none without a GPU.

        In the process that verifies, which is a new one afterwards: a profiler may leave calls slower that it has watched.
        """
        if not self.has_gpu:
            return ()
        source = candidate.source if candidate.code is not None else None
        request = ProfileRequest(self._capture, self._own, self._capture.graph.sizes, WATCH_SECONDS, source)
        try:
            with alone(self._gpu.result()):
                seen = self._limited(self._runner, request, self._run_seconds)
        finally:
            self._runner.next()
            self._background.submit(self._runner.warm_up)
        times = [KernelTime(kernel.name, kernel.calls, kernel.us) for kernel in seen.kernels]
        return tuple(sorted(times, key=lambda time: -time.us))

    def _timed_alone(self, request: Request[Answer]) -> Answer:
        self._wait_for_baseline()
        with alone(self._gpu.result()):
            return self._timed(request)

    def _timed(self, request: Request[Answer]) -> Answer:
        try:
            return self._limited(self._timer, request, self._time_seconds)
        except MtmcError as error:
            if error.kind.is_gpu_failure:
                # A failed kernel leaves the process's GPU context unusable.
                self._timer.next()
            raise
