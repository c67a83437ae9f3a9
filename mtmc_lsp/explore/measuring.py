"""Compiles, verifies and times sibling versions in worker processes: by Triton's interpreter, or on the GPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.results import CompileReport, KernelReport, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.explore.judgement import Judgement, SiblingMeasurer, timed_outcome
from mtmc_lsp.measure.compilation import KernelCompiler
from mtmc_lsp.measure.timer import Timer
from mtmc_lsp.process.fork_server import INTERPRETER_ENV, ForkServer
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.process.worker_process import Sandbox, Worker
from mtmc_lsp.search.failures import failure_reason
from mtmc_lsp.timing.messages import SiblingTime
from mtmc_lsp.verify.adapters import BrieflyVerifiedVersion
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.engine import VerificationEngine
from mtmc_lsp.verify.reference import Reference

COMPILE_SECONDS = 120.0
"""Time limit for the kernels of all versions of one batch."""
CASE_SECONDS = 60.0
"""Time limit for one case under the interpreter."""
TIME_SECONDS = 60.0
"""Time limit for timing a batch."""


@dataclass(frozen=True)
class Place:
    """Where versions run."""

    capture: Capture
    source: str
    """The user's file without generated code."""
    python: str
    archs: tuple[str, ...]
    """Architectures to compile for if there is no GPU."""
    fork_server: ForkServer | None
    deadline: float
    """Time of the monotonic clock after which nothing continues."""
    needs_sandbox: bool = False
    """Whether to refuse versions without a complete sandbox."""

    @property
    def has_gpu(self) -> bool:
        """Whether versions are timed."""
        return bool(self.capture.environment.gpu) and self.capture.workload.device == "cuda"


def open_measurer(place: Place) -> InterpreterMeasurer | GpuMeasurer:
    """What measures on this machine; the caller closes it."""
    variables = {} if place.has_gpu else INTERPRETER_ENV
    if place.fork_server is not None and dict(place.fork_server.env) != variables:
        # Its workers would interpret kernels where they must compile them, or the other way round.
        place = replace(place, fork_server=None)
    return GpuMeasurer(place) if place.has_gpu else InterpreterMeasurer(place)


class _Workers:
    """Two processes that both measurers share: a compiler and a process that runs versions."""

    def __init__(self, place: Place) -> None:
        self.place = place
        capture = place.capture
        self.cwd = str(project_root(Path(capture.workload.target.path)))
        self._kernels = tempfile.mkdtemp(prefix="mtmc-kernels-")
        self.pool = WorkerPool(has_gpu=place.has_gpu, deadline=place.deadline)
        self._background = ThreadPoolExecutor(1)
        env = {"TRITON_CACHE_DIR": self._kernels}
        sandbox = Sandbox((self._kernels,), "", programs=True)
        compiler = self.pool.add(
            Worker(place.python, cwd=self.cwd, env=env, sandbox=sandbox, fork_server=place.fork_server)
        )
        archs = (capture.environment.capability,) if place.has_gpu else place.archs
        self._archs = archs
        self._compiler = KernelCompiler(
            capture, self.pool, compiler, compiler, self._background, archs=archs, seconds=COMPILE_SECONDS
        )

    def candidate_process(self, hidden: str = "") -> CandidateProcess:
        """A process that runs versions, with the kernels that were compiled."""
        return self.pool.add(
            CandidateProcess(
                self.place.python,
                self.cwd,
                self.place.capture.environment,
                has_gpu=self.place.has_gpu,
                hidden=hidden,
                fork_server=self.place.fork_server,
                needs_sandbox=self.place.needs_sandbox,
                kernels=self._kernels,
            )
        )

    def compile(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        """Compile several versions at once; if the compiler's process fails, one after the other."""
        try:
            return self._compiler.compile_variants(candidates)
        except WorkerFailed as error:
            _raise_if_over(error)
            if len(candidates) == 1:
                is_limit = error.kind is FailureKind.TIMEOUT or error.kind.is_out_of_memory
                report = KernelReport("", self._archs[0], error=error.message, ran_out_of_time=is_limit)
                return [CompileReport((report,))]
        return [report for candidate in candidates for report in self.compile([candidate])]

    def close(self) -> None:
        """End the processes and remove their files."""
        self._background.shutdown(wait=False, cancel_futures=True)
        self.pool.close()
        shutil.rmtree(self._kernels, ignore_errors=True)


class InterpreterMeasurer(SiblingMeasurer):
    """Cross-compiles versions, and verifies them briefly by Triton's interpreter. Nothing is timed."""

    has_gpu = False
    most_at_once = 2
    """Enough for two cores; what the end of the time cuts off is lost."""

    def __init__(self, place: Place) -> None:
        """Prepare without starting a process."""
        self._place, self._workers = place, _Workers(place)
        self._reference = Reference(
            place.capture,
            place.source,
            place.python,
            pool=self._workers.pool,
            run_seconds=CASE_SECONDS,
            fork_server=place.fork_server,
        )
        process = self._workers.candidate_process(self._reference.hidden)
        self._engine = VerificationEngine(self._reference, process)

    def device(self) -> DeviceModel:
        return planning_model(self._place.archs)

    def compile(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        return self._workers.compile(candidates)

    def judge(self, before: Candidate, groups: Sequence[Sequence[Candidate]]) -> list[list[Judgement]]:
        return [[self._verify(candidate) for candidate in group] for group in groups]

    def _verify(self, candidate: Candidate) -> Judgement:
        version = BrieflyVerifiedVersion(self._place.capture, self._place.source, candidate.source)
        try:
            return _judgement(self._engine.verify(version).verdict)
        except MtmcError as error:
            _raise_if_over(error)
            return _failure(error)

    def close(self) -> None:
        """End the processes."""
        self._reference.close()
        self._workers.close()


class GpuMeasurer(SiblingMeasurer):
    """Compiles versions for the GPU, compares their results on the timed inputs, and times all of them in one go."""

    has_gpu = True
    most_at_once = 1000

    def __init__(self, place: Place) -> None:
        """Start the process that times."""
        self._place, self._workers = place, _Workers(place)
        self._process = self._workers.candidate_process()
        self._timer = Timer(
            place.capture, place.source, self._workers.pool, self._process, baselines=(), seconds=TIME_SECONDS
        )
        self._process.start()
        self._workers.pool.set_gpu(self._process.gpu)

    def device(self) -> DeviceModel:
        return self._timer.device()

    def compile(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        return self._workers.compile(candidates)

    def judge(self, before: Candidate, groups: Sequence[Sequence[Candidate]]) -> list[list[Judgement]]:
        """Time all versions in one lock period; if one of them breaks the process, each group and then each version alone."""
        sources = [[candidate.source for candidate in group] for group in groups]
        previous = before.source if before.code is not None else None
        try:
            return [[_timed(time) for time in group] for group in self._timer.siblings(previous, sources)]
        except MtmcError as error:
            _raise_if_over(error)
            if sum(map(len, groups)) == 1:
                return [[_failure(error)]]
        if len(groups) > 1:
            return [judgements for group in groups for judgements in self.judge(before, [group])]
        return [[judgement for candidate in groups[0] for judgement in self.judge(before, [[candidate]])[0]]]

    def close(self) -> None:
        """End the processes."""
        self._workers.close()


def _raise_if_over(error: MtmcError) -> None:
    """Raise an error that is not the fault of a version: the time is over, or a process was ended from outside."""
    if error.kind is FailureKind.DEADLINE:
        raise error
    failure_reason(error)


def _failure(error: MtmcError) -> Judgement:
    """The judgement on a version whose process failed."""
    is_limit = error.kind is FailureKind.TIMEOUT or error.kind.is_out_of_memory
    if error.kind is FailureKind.COMPILE_ERROR:
        return Judgement(Outcome.COMPILE_ERROR, error.message)
    return Judgement(Outcome.OUT_OF_TIME if is_limit else Outcome.WRONG, error.message)


def _judgement(verdict: Verdict) -> Judgement:
    """The judgement that a brief verification leads to.

    Raises:
        WorkerFailed: the time of the program is over.
    """
    status, failure = verdict.status, verdict.failure
    if failure is FailureKind.DEADLINE:
        raise WorkerFailed(verdict.reason, kind=failure)
    has_run = any(check.case for check in verdict.checks)
    if verdict.is_correct or (status is VerdictStatus.UNCERTIFIABLE and has_run):
        outcome = Outcome.CORRECT
    elif status in (VerdictStatus.TIMEOUT, VerdictStatus.UNCERTIFIABLE) or verdict.is_out_of_memory:
        outcome = Outcome.OUT_OF_TIME
    elif status is VerdictStatus.COMPILE_ERROR:
        outcome = Outcome.COMPILE_ERROR
    else:
        outcome = Outcome.WRONG
    return Judgement(outcome, verdict.reason, verdict=verdict)


def _timed(time: SiblingTime) -> Judgement:
    """The judgement on a version that was loaded, compared and timed."""
    if time.error:
        kind = time.kind
        is_limit = kind is not None and kind.is_out_of_memory
        outcome = Outcome.OUT_OF_TIME if is_limit else Outcome.WRONG
        return Judgement(Outcome.COMPILE_ERROR if kind is FailureKind.COMPILE_ERROR else outcome, time.error)
    outcome = timed_outcome(time.ratio, time.ratio_error)
    return Judgement(
        outcome,
        before_us=time.before_us,
        after_us=time.after_us,
        ratio=time.ratio,
        ratio_error=time.ratio_error,
        timing=time.timing,
    )
