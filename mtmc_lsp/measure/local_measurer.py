"""Verifies, compiles and times versions of the user's file in worker processes on this machine."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, WorkerFailed
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.results import BaselineTime, Check, CheckStatus, CompileReport, Timing, Verdict
from mtmc_lsp.core.run import Candidate, Placement
from mtmc_lsp.core.workload import Capture, Workload
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.measure.compilation import COMPILE_SECONDS, KernelCompiler
from mtmc_lsp.measure.early_processes import EarlyProcesses
from mtmc_lsp.measure.timer import Timer
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.sandbox import Isolation
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.process.worker_process import Sandbox, Worker
from mtmc_lsp.timing.messages import ProfileRequest
from mtmc_lsp.timing.timekeeper import TIME_SECONDS
from mtmc_lsp.verify.adapters import VersionInFile
from mtmc_lsp.verify.candidate_process import RUN_SECONDS, CandidateProcess
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.engine import VerificationEngine
from mtmc_lsp.verify.int32_overflow import FAR_CHECK, OTHERS_FILL
from mtmc_lsp.verify.messages import CandidateSource, WholeTargetAnswer, WholeTargetRequest
from mtmc_lsp.verify.outcomes import with_whole_target
from mtmc_lsp.verify.reference import PreparedCase, Reference, is_host_bound
from mtmc_lsp.verify.sizes.libraries import libraries_of

BACKGROUND_THREADS = 9
"""Threads that wait for processes: starting six of them, compiling ahead and compiling the baselines at the same time."""
FAR_RESERVE_SECONDS = 5.0
"""The wait for other runs' checks beyond 2^31 elements ends so long before the deadline: this one and the last timing follow."""
PROFILE_SECONDS = 1.0
"""Approximate duration of a profile."""


@dataclass(frozen=True)
class MeasureOptions:
    """How candidates are measured."""

    archs: tuple[str, ...] = ("sm_80", "sm_90", "gfx942")
    """Architectures to compile for if there is no GPU."""
    precision: str = "budget"
    """``budget`` or ``strict``, as in the settings."""
    baselines: tuple[str, ...] = ("compile",)
    """Modes of ``torch.compile`` to time besides eager mode: ``compile``, ``max-autotune``."""
    compile_decides: bool = False
    """Whether a version must beat ``torch.compile``, which is then compiled however long that may take."""
    seed: int | None = None
    """Of the verification inputs; ``None`` for one that no candidate can know."""
    fresh: bool = False
    """Whether to ignore cached timings."""
    needs_sandbox: bool = False
    """Whether to refuse candidates without a complete sandbox."""
    deadline: float | None = None
    """Time of the monotonic clock after which nothing continues."""
    run_seconds: float = RUN_SECONDS
    """Time limit for one case of one candidate."""
    compile_seconds: float = COMPILE_SECONDS
    """Time limit for compiling one candidate."""
    time_seconds: float = TIME_SECONDS
    """Time limit for timing one candidate, including the preparation of the baselines."""


class LocalMeasurer:
    """A :class:`~mtmc_lsp.core.protocols.Measurer` on this machine: on its GPU, or else by Triton's interpreter."""

    def __init__(
        self,
        capture: Capture,
        python: str,
        options: MeasureOptions | None = None,
        *,
        source: str | None = None,
        fork_server: ForkServer | None = None,
        whole: Workload | None = None,
        early: EarlyProcesses | None = None,
    ) -> None:
        """Prepare the processes. On a GPU they start in the background, else with the first call.

        Args:
            source: the user's file at the start of the run; by default it is read.
            whole: the workload of the whole target, if the capture is of a region.
            fork_server: starts the processes by forks if its environment variables fit; the caller closes it.
            early: processes that start already; without a GPU, the caller closes them.
        """
        options = options or MeasureOptions()
        target_path = Path(capture.workload.target.path)
        self._capture, self._options, self._source, self._whole = capture, options, source, whole
        self._user_source = source if source is not None else target_path.read_bytes().decode("utf-8")
        self.has_gpu = bool(capture.environment.gpu) and capture.workload.device == "cuda"
        variables = {} if self.has_gpu else {"TRITON_INTERPRET": "1"}
        fits = fork_server is not None and dict(fork_server.env) == variables
        self._own_fork_server = None if fits else ForkServer(python, variables, preload=True)
        fork_server = fork_server if fits else self._own_fork_server
        self._background = ThreadPoolExecutor(BACKGROUND_THREADS)
        early = early if self.has_gpu else None
        if early is not None:
            early.take()
        self._kernels = early.kernels if early is not None else tempfile.mkdtemp(prefix="mtmc-kernels-")
        self._pool = WorkerPool(has_gpu=self.has_gpu, deadline=options.deadline)
        self._reference = Reference(
            capture,
            source,
            python,
            pool=self._pool,
            seed=options.seed,
            precision=options.precision,
            run_seconds=options.run_seconds,
            fork_server=fork_server,
            early=early.reference if early is not None else None,
        )
        cwd = str(project_root(target_path))

        def candidate_process(worker: Worker | None = None) -> CandidateProcess:
            return CandidateProcess(
                python,
                cwd,
                capture.environment,
                has_gpu=self.has_gpu,
                hidden=self._reference.hidden,
                fork_server=fork_server,
                needs_sandbox=options.needs_sandbox,
                kernels=self._kernels,
                early=worker,
                libraries=libraries_of(capture.graph),
            )

        def compiler(low_priority: bool) -> Worker:
            sandbox = Sandbox((self._kernels,), self._reference.hidden, programs=True)
            env = {"TRITON_CACHE_DIR": self._kernels}
            return Worker(python, cwd=cwd, env=env, sandbox=sandbox, fork_server=fork_server, low_priority=low_priority)

        started = (early.candidate, None, early.trials) if early is not None else (None, None, None)
        self._process, baseline_process, trial_process = (self._pool.add(candidate_process(one)) for one in started)
        self._trial_process = trial_process
        # Its cases take long one after the other. The second process shares the compiled kernels.
        runs_beside = self.has_gpu and is_host_bound(capture)
        self._second_process = self._pool.add(candidate_process()) if runs_beside else None
        compile_worker, background_worker = self._pool.add(compiler(False)), self._pool.add(compiler(True))
        self._engine = VerificationEngine(self._reference, self._process, self._second_process)
        self._is_prepared, self._preparing = False, threading.Lock()
        self._first: PreparedCase | None = None
        """The workload's case; None before it is prepared."""
        self._compiled_ahead: set[str] = set()
        """The ids of the candidates whose kernels are compiled for other sizes."""
        self._compiler = KernelCompiler(
            capture,
            self._pool,
            compile_worker,
            background_worker,
            self._background,
            archs=(capture.environment.capability,) if self.has_gpu else options.archs,
            seconds=options.compile_seconds,
        )
        self._timer = Timer(
            capture,
            source,
            self._pool,
            baseline_process,
            trial_process,
            baselines=options.baselines,
            fresh=options.fresh,
            seconds=options.time_seconds,
        )
        if self.has_gpu:
            # Importing torch takes seconds, so all processes start at once, while the first step is planned.
            starting = self._background.submit(self._start_timing, trial_process)
            self._first_process = self._background.submit(self._process.warm_up)
            self._background.submit(self._reference.start)
            # Baselines start last, because the first step does not need them.
            starting.add_done_callback(lambda _: self._warm_up_later(baseline_process))
            self._warm_up_second()
            self._compiler.prepare()

    def _warm_up_second(self) -> None:
        if self._second_process is not None:
            self._background.submit(self._second_process.warm_up)

    def isolation(self) -> Isolation:
        """The level of the candidates' sandbox.

        Raises:
            EnvironmentNotAble: it is incomplete and a complete one is required.
        """
        return self._process.isolation

    def _start_timing(self, process: CandidateProcess) -> None:
        """Start the timing process and set the GPU. The first request reports an error."""
        process.warm_up()
        self._pool.set_gpu(process.gpu)

    def prepare_first_step(self) -> None:
        """While the first step is planned, start the compiler, and on a GPU compute references.

        On a GPU the compiler has started already.
        """
        self._compiler.prepare()
        if self.has_gpu:
            self._background.submit(self._prepare_early)

    def _prepare_early(self) -> None:
        """Compute references once the GPU's free memory is known, which limits them."""
        self._first_process.result()
        self._prepare()

    def _warm_up_later(self, process: CandidateProcess) -> None:
        # After the end of the run, no further work is accepted.
        with contextlib.suppress(RuntimeError):
            self._background.submit(process.warm_up)

    def device(self) -> DeviceModel:
        """The calibrated GPU of this machine, or without a GPU the model of a data file."""
        return self._timer.device() if self.has_gpu else planning_model(self._options.archs)

    def close(self) -> None:
        """End the processes and remove their files."""
        self._background.shutdown(wait=False, cancel_futures=True)
        self._compiler.stop_background()
        self._reference.close()
        self._pool.close()
        if self._own_fork_server is not None:
            self._own_fork_server.close()
        shutil.rmtree(self._kernels, ignore_errors=True)

    @property
    def verifies_beside(self) -> bool:
        """Whether :meth:`verify` may run in another thread: on a GPU that has memory for both processes."""
        return self.has_gpu and not self._engine.is_tight(self._capture)

    @property
    def waited_seconds(self) -> float:
        """How long verifications have waited for the expected results, which are computed once."""
        return self._reference.waited_seconds

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        """Run the candidate on every case, in a new process."""

        def stop_if_unwanted(_: Case) -> None:
            if not is_wanted():
                raise WorkerFailed("the verification was abandoned", kind=FailureKind.CANCELLED)

        self._prepare()
        self._compile_other_sizes(candidate)
        try:
            verdict = self._engine.verify(self._version(candidate.source, candidate), on_case=stop_if_unwanted).verdict
            if self._whole is None or not verdict.is_correct:
                return verdict
            return with_whole_target(verdict, self._verify_whole_target(self._whole, candidate.source))
        finally:
            if self.has_gpu:
                self._background.submit(self._process.warm_up)
                self._warm_up_second()
                self._prepare_baselines()

    def _verify_whole_target(self, workload: Workload, text: str) -> WholeTargetAnswer:
        """Call the whole target in the user's file and in a version with code for regions, in a new process."""
        workload = replace(workload, module=self._capture.workload.module)
        request = WholeTargetRequest(self._capture, workload, self._user_source, text)
        self._process.next()
        try:
            return self._pool.call(self._process, request, self._options.run_seconds)
        except WorkerFailed as error:
            if error.kind is not FailureKind.TIMEOUT:
                raise
            return WholeTargetAnswer(skipped="a call of the whole target takes too long")
        finally:
            self._process.next()

    def verify_int32_offsets(self, candidate: Candidate) -> Check:
        """Run a correct candidate once more where element offsets exceed 2^31, if the GPU has the memory."""
        version = self._version(candidate.source, candidate)
        if not self.has_gpu:
            return self._engine.verify_int32_offsets(version)
        try:
            self._process.next()
            self._process.start()
            # The case needs most of the free memory. Others go on, and their timings pass between two commands.
            with self._pool.filling_gpu(FAR_RESERVE_SECONDS) as is_held:
                if not is_held:
                    return Check(FAR_CHECK, CheckStatus.SKIPPED, "", OTHERS_FILL)
                with self._pool.exclusive_gpu():
                    # Others allocated memory since the process started: this reads what is free between their commands.
                    self._process.start()
                return self._engine.verify_int32_offsets(version, self.device().bandwidth)
        finally:
            self._process.next()

    def _version(self, text: str, candidate: Candidate | None = None) -> VersionInFile:
        code = candidate.code if candidate is not None else None
        return VersionInFile(self._capture, self._user_source, text, code.place if code is not None else Placement.END)

    def _prepare(self) -> None:
        """Compute references, and on a GPU compile the baselines, while the first candidate is compiled.

        Where memory is tight, the baselines wait for the first verdict: a trial and a verification need the memory first.
        """
        with self._preparing:
            if self._is_prepared:
                return
            self._is_prepared = True
            cases = self._engine.compute_ahead(self._version(self._user_source))
            self._first = cases[0] if cases else None
            if not self._engine.is_tight(self._capture):
                self._prepare_baselines()

    def _prepare_baselines(self) -> None:
        """Compile the baselines in the background; only the first call does."""
        if self.has_gpu and self._first is not None:
            end = None if self._options.compile_decides else self._options.deadline
            seconds = math.inf if end is None else end - time.monotonic()
            self._timer.prepare_baselines(self._background, self._reference, self._first, seconds)

    def compile(self, candidate: Candidate) -> CompileReport:
        """Cross-compile every kernel for every architecture."""
        self._prepare()
        if self.verifies_beside:
            # The verification begins with the timing, and would compile one kernel at a time.
            self._compile_other_sizes(candidate)
        return self._compiler.compile(candidate)

    def _compile_other_sizes(self, candidate: Candidate) -> None:
        """Compile the kernels for the sizes of the verification in the background."""
        if self.has_gpu and candidate.id not in self._compiled_ahead:
            self._compiled_ahead.add(candidate.id)
            sizes = self._engine.kernel_sizes(self._version(candidate.source, candidate))
            self._compiler.compile_in_background(candidate, sizes)

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        """Time a candidate for a short time, against the previous version and the baselines that are ready.

        Returns:
            The timing; ``None`` without a GPU.

        Raises:
            ResultsDiffer: the results differ from those of the user's code.
            MeasurementRejected: the timing cannot be true.
            GpuInUse: another program used the GPU.
        """
        if not self.has_gpu:
            return None
        return self._timer.time_trial(CandidateSource(candidate.source), previous=_generated(previous))

    def time_with_baselines(
        self, candidate: Candidate, previous: Candidate | None, wait: float | None
    ) -> Timing | None:
        """Time a candidate against its baselines and the previous version; ``None`` without a GPU.

        Args:
            wait: how many seconds to wait for baselines that are still compiled; ``None`` for no limit.

        Raises:
            MeasurementRejected: the timing cannot be true.
            GpuInUse: another program used the GPU.
        """
        if not self.has_gpu:
            return None
        self._compiler.stop_background()
        uses_graph = isinstance(candidate.schedule, Mapping) and candidate.schedule.get("cuda_graph")
        # A version that replays a CUDA graph is also compared with the compiler's mode that does.
        more = ("reduce-overhead",) if uses_graph else ()
        source = CandidateSource(candidate.source)
        return self._timer.time(source, previous=_generated(previous), more_baselines=more, wait=wait)

    def untimed_baselines(self) -> tuple[BaselineTime, ...]:
        """The baselines of the settings, each with a note that says why it was not timed; none before they are compiled."""
        return self._timer.untimed_baselines() if self.has_gpu else ()

    def recompilations(self) -> tuple[int, float]:
        """How often ``torch.compile`` compiles again for the other sizes that are verified, and the seconds that takes.

        Raises:
            MtmcError: it cannot be measured.
        """
        answer = self._timer.recompilations(self._engine.kernel_sizes(self._version(self._user_source)))
        return answer.count, answer.seconds

    def compile_variants(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        """Compile several candidates at once, on all cores.

        A ranking then finds the kernels in Triton's cache; it would compile them one after the other.
        """
        try:
            return self._compiler.compile_variants(candidates)
        except WorkerFailed as error:
            if error.kind is FailureKind.DEADLINE:
                raise
            # The ranking compiles what is missing.
            return [CompileReport() for _ in candidates]

    def quick(self, candidates: Sequence[Candidate], *, seconds: float | None = None) -> list[float | None]:
        """Rank candidates on the GPU: median microseconds, ``None`` for those that fail.

        Args:
            candidates: variants of one version.
            seconds: time limit; candidates not timed by then count as failed.

        Raises:
            EnvironmentNotAble: there is no GPU.
        """
        if not self.has_gpu:
            raise EnvironmentNotAble("ranking needs a CUDA GPU")
        return self._timer.rank([candidate.source for candidate in candidates], seconds)

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        """The kernels of one call by torch's profiler, the slowest first; none without a GPU.

        This uses the process of the trials and then a new one, because a profiler may slow down later calls.
        """
        if not self.has_gpu:
            return ()
        source = candidate.source if candidate.code is not None else None
        request = ProfileRequest(self._capture, self._source, self._capture.graph.sizes, PROFILE_SECONDS, source)
        try:
            profile = self._pool.call(self._trial_process, request, self._options.run_seconds)
        finally:
            self._trial_process.next()
            self._background.submit(self._trial_process.warm_up)
        times = [KernelTime(kernel.name, kernel.calls, kernel.us) for kernel in profile.kernels]
        return tuple(sorted(times, key=lambda time: -time.us))


def _generated(version: Candidate | None) -> str | None:
    """The file with a version's generated code; None if it has none."""
    return version.source if version is not None and version.code is not None else None
